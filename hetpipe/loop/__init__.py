"""The loop of `Pipeline.fit`: epochs, evaluations, and the state from which a run resumes."""
