"""Small networks with inputs other than one image, as the text of a user's file."""

TEXT = '''
from dataclasses import dataclass
from typing import Optional
import torch
from torch import nn

class Two(nn.Module):
    """Two images of different sizes."""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    def forward(self, left, right): return self.a(left).mean((2, 3)) - self.b(right).amax((2, 3))

def two(): return Two()
def two_inputs(): return torch.randn(2, 3, 16, 16), torch.randn(2, 3, 8, 8)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)
    def forward(self, input_ids, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        return self.head(self.body(self.embed(input_ids), src_key_padding_mask=padding)[:, 0])

def tokens(): return Tokens()
def tokens_inputs():
    return {"input_ids": torch.zeros(1, 12, dtype=torch.int64), "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
def bare(): return Tokens()
def lstm(): return nn.LSTM(6, 5, batch_first=True)
def lstm_inputs(): return torch.randn(3, 7, 6)
def audio(): return nn.Sequential(nn.Conv1d(1, 4, 9, stride=4), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))

class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, *, pixels): return self.conv(pixels).mean((2, 3))
def keyword(): return Keyword()

@dataclass
class Out:
    logits: torch.Tensor
    hidden: Optional[tuple] = None

class Data(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        y = self.conv(x)
        return Out(y.mean((2, 3)), (y, y.amax((2, 3))))
def data(): return Data()

class Dict(Data):
    def forward(self, x):
        y = self.conv(x)
        return {"logits": y.mean((2, 3)), "map": y}
def dictionary(): return Dict()

class Cond(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
    def forward(self, x):
        x = x.mean((2, 3))
        return torch.cond(x.sum() > 0, lambda x: self.left(x), lambda x: self.right(x), (x,))
def cond(): return Cond()

class Scripted(nn.Module):
    """Both sides of a branch, and an optional parameter."""
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 3)
    def forward(self, x: torch.Tensor, scale: float = 1.0):
        if x.sum() > 0:
            return self.fc(x) * scale
        return self.fc(-x)
def script(): return torch.jit.script(Scripted())

def quantised():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)

def statically():
    torch.manual_seed(0)
    layers = nn.Sequential(*(part for _ in range(8) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())))
    net = torch.ao.quantization.QuantWrapper(layers).eval()
    net.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    torch.ao.quantization.prepare(net, inplace=True)
    net(torch.randn(16, 3, 8, 8))
    return torch.ao.quantization.convert(net)

class Rate(nn.Module):
    """A number beside the tensor."""
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 9)
    def forward(self, x, sr): return self.conv(x).mean(2) * (sr / 16000)
def rate(): return Rate()

class Unbatched(nn.Module):
    """A table whose first axis has the batch's length by chance."""
    def __init__(self):
        super().__init__()
        self.fc, self.bias = nn.Linear(4, 4), nn.Parameter(torch.zeros(5))
    def forward(self, x, table): return self.fc(x) @ table.T + self.bias
def unbatched(): return Unbatched()
def unbatched_inputs(): return torch.randn(5, 4), torch.randn(5, 4)

class Fixed(nn.Module):
    """Takes the batch of its example alone."""
    def forward(self, x): return x.reshape(2, 6) * 2
def fixed(): return Fixed()
def fixed_inputs(): return torch.randn(2, 2, 3)
'''
