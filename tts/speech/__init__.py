"""Speech requests: from text to segments, streams and encoded audio with word times."""
