"""Every interleaving of small transfers: the two machines of the protocol in a world without time."""
