"""From PyTorch's captured graph to data that the rest of the compiler understands."""
