"""A draft model guesses tokens, and one forward of the target model verifies them."""
