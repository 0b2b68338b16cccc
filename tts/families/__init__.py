"""Speech families: how each kind of checkpoint is asked to speak, one file each."""
