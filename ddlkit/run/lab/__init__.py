"""The shaped-network lab: real collectives between ranks in Linux network namespaces."""
