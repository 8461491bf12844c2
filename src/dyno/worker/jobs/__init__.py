"""Jobs that time no trial (a model's inputs and layers, the device's peak, the stress test), and measuring in turns."""
