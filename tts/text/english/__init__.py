"""Rules that read numbers, signs and abbreviations as English words."""
