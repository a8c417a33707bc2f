"""Export: a model, its loss and an example batch become one flat graph, by torch.export."""
