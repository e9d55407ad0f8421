"""Plain PyTorch: one process trains a small CNN on digits."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN

EPOCHS = 8

torch.manual_seed(0)
data = digits()
model = DigitsCNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(EPOCHS):
    for images, labels in DataLoader(data.train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

images, labels = data.test.tensors
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.3f}")
