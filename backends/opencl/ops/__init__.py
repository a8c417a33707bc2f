"""The operators that OpenCL devices run. Importing this package registers them all."""
