"""How near layers come to what the device can do: arithmetic and bytes against measured ceilings.

The roofline model (Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009): a layer takes at least the
time of its operations at the highest rate of arithmetic, and at least the time of its bytes at the highest rate of
memory. Both rates are measured on the device itself: a matrix product in the layer's type, and a large copy.
"""
