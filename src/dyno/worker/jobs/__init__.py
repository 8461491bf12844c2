"""Jobs that time no trial (inspecting a model, the device's peak, the stress test), and measuring in turns."""
