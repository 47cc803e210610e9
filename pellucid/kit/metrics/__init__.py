"""Tables over models: what each graph, kernel and fusion is like, for questions that one model does not answer."""
