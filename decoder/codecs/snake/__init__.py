"""Networks with Snake activations, which SNAC and DAC share."""
