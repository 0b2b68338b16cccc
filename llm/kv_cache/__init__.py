"""KV memory: page ids and prefix tree on the host (no torch), tensors on the device."""
