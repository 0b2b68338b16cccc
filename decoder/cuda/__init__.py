"""Audio decoders on a GPU: graphs, padding, postprocessing and host memory."""
