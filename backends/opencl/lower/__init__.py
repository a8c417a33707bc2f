"""From a graph to launches of kernels: expressions, fusion, generated code."""
