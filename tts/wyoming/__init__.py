"""Wyoming, the protocol of Home Assistant's voice services, over the one synthesizer."""
