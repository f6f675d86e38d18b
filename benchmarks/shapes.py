"""Parameter shapes of models, as lists: what an optimizer sees of them."""


def llama(layers, hidden, intermediate, vocab, kv=None, tied=False):
    """Llama: attention with ``kv`` columns of keys and values, gated MLP, two norms a layer."""
    kv = kv or hidden
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(vocab, hidden), *layer * layers, (hidden,), *([] if tied else [(vocab, hidden)])]


def gpt2(layers=12, hidden=768, vocab=50257, positions=1024):
    """GPT-2: transposed weights, biases, tied output."""
    layer = [(hidden,), (hidden,), (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    layer += [(hidden,), (hidden,), (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    return [(vocab, hidden), (positions, hidden), *layer * layers, (hidden,), (hidden,)]


def vit(layers=32, hidden=1280, patch=14, tokens=257, classes=1000):
    """ViT-H/14 for images of 224 pixels."""
    layer = [(hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    layer += [(hidden,), (hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    head = [(hidden,), (hidden,), (classes, hidden), (classes,)]
    return [(1, 1, hidden), (1, tokens, hidden), (hidden, 3, patch, patch), (hidden,), *layer * layers, *head]


def resnet(blocks=(3, 4, 23, 3), classes=1000):
    """ResNet-101: bottleneck blocks of three convolutions, each with a batch norm."""
    shapes, columns = [(64, 3, 7, 7), (64,), (64,)], 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            convolutions = [(width, columns, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, columns, 1, 1))
            shapes += [shape for c in convolutions for shape in (c, c[:1], c[:1])]
            columns = 4 * width
    return [*shapes, (classes, columns), (classes,)]


SHAPES = {
    "64m": [(2048, 2048)] * 16,
    "llama2-7b": llama(32, 4096, 11008, 32000),
    "llama-1b": llama(16, 2048, 8192, 128256, kv=512, tied=True),
    "gpt2-124m": gpt2(),
    "vit-h": vit(),
    "resnet-101": resnet(),
}
