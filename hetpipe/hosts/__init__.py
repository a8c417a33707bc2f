"""Connections between the hosts of a cluster: secret, encryption, messages, meeting."""
