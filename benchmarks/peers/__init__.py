"""HetSync beside DDP, PostLocalSGD, torchft and Horovod: the same jobs, one after the other."""
