"""Personal models beside training alone and fine-tuned FedAvg, equally tuned, and on the split of pFedMe's paper."""
