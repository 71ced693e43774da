"""The arithmetic of the sharing paper: its two displayed equations, and its prose.

References
----------
sharing : S. Zhong and S. Qu, "Resource Sharing between Computation and Communication".
"""

from __future__ import annotations


def gain(throughput: float, default_throughput: float) -> float:
    """Return the relative gain over the default configuration (sharing Tab 2, Fig 8).

    Examples
    --------
    >>> gain(throughput=110.0, default_throughput=88.0)
    0.25
    """
    return throughput / default_throughput - 1


def gain_range(throughput: float, default_throughput: float) -> tuple[float, float]:
    """Return the least and the largest `gain` of two rounded throughputs.

    Parameters
    ----------
    throughput, default_throughput : float
        Images per second, each rounded to a whole number.

    Returns
    -------
    least, most : float
        Relative gains: 0.1 is 10%.
    """
    least = gain(throughput - 0.5, default_throughput + 0.5)
    most = gain(throughput + 0.5, default_throughput - 0.5)
    return least, most


def iteration_s(batch: int, images_per_s: float) -> float:
    """Return the iteration in seconds at a throughput (sharing 4.4.2)."""
    return batch / images_per_s


def model_intensity(forward_flops: float, parameters: float) -> float:
    """Return the intensity of a model (sharing 4.4.1, first equation).

    Parameters
    ----------
    forward_flops : float
        The FLOP C of a forward pass on one image. Tab 2 counts 2 for a multiply-add.
    parameters : float
        The number D of parameters.

    Returns
    -------
    float
        FLOP per parameter.

    Notes
    -----
    I = C / D

    Examples
    --------
    >>> round(model_intensity(forward_flops=8.2e9, parameters=25.6e6))  # ResNet-50
    320
    """
    return forward_flops / parameters


def compute_to_communication(
    batch: int, forward_flops: float, parameters: float
) -> float:
    """Return compute divided by communication (sharing 4.4.1, second equation).

    Parameters
    ----------
    batch : int
        The batch size B.
    forward_flops : float
        The FLOP C of a forward pass on one image.
    parameters : float
        The number D of parameters.

    Returns
    -------
    float
        FLOP of an iteration per exchanged parameter.

    Notes
    -----
    3 B C / (2 D). The backward pass has about twice the FLOP of the forward pass, so that both
    have 3 C for each image. The D parameters are sent, and as many are received.
    """
    return 3 * batch * forward_flops / (2 * parameters)


def vit_flops() -> float:
    """Return the FLOP of a forward pass of ViT-Base/16 (sharing Tab 2, column C).

    Returns
    -------
    float
        FLOP on one image of 224 x 224 pixels. A multiply-add counts as 2.

    Notes
    -----
    For each token, one of the 12 layers has

    * 4 width^2 multiply-adds for the query, the key, the value and the projection,
    * 2 width mlp multiply-adds for the two products of the MLP, and
    * 2 tokens width multiply-adds for the scores of attention and their application.

    The embedding of the patches comes before the layers, and the classifier after them.
    """
    # A patch has 16 x 16 pixels of three channels.
    patches = (224 // 16) ** 2
    patch_values = 3 * 16 * 16
    width = 768
    mlp = 3072
    layers = 12
    classes = 1000
    # The class token is added to the patches.
    tokens = patches + 1
    layer = tokens * (4 * width * width + 2 * width * mlp + 2 * tokens * width)
    embedding = patches * patch_values * width
    # Only the class token is classified.
    classifier = width * classes
    multiply_adds = embedding + layers * layer + classifier
    return 2.0 * multiply_adds
