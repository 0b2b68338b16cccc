"""Speech families: prompts, vocabularies and voices of each kind of checkpoint, one file each."""
