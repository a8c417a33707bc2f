"""The benchmark of unlike devices against their sum: the rows of `hetpipe bench`."""
