"""Tables of graphs, kernels and fusions over several models, for questions that one model does not answer."""
