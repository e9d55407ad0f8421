"""The same loop, delay-synchronised: mpirun -np N python after.py"""

import torch
from torch.nn.functional import cross_entropy

import hetsync
from hetsync.data.sets.digits import digits
from hetsync.models.digits_cnn import DigitsCNN

EPOCHS = 8

torch.manual_seed(0)
data = digits()
model = DigitsCNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with hetsync.join(model, optimizer, data.train, batch_size=64, epochs=EPOCHS) as session:
    for images, labels in session.slices():
        loss = cross_entropy(model(images), labels)
        loss.backward()
        session.step(loss)

images, labels = data.test.tensors
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.3f}")
