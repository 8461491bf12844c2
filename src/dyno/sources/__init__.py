"""What a user names as a model or its inputs: modules in memory, files of torch.save, descriptions of inputs."""
