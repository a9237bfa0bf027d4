"""Shapes of KernelBench's level 1 (Ouyang et al., 2025), scaled for one thread of a CPU.

The problems are those of level 1 that one of our generators writes: products of matrices of
every aspect, squares of convolution, pooling, sums, softmax, relu. The sizes keep the problem's
character (square, large K, small K, irregular, tall) and shrink until the unscheduled kernel takes
at most 50 ms. What has no generator is left out: triangular and transposed products, norms,
losses, three dimensions, dilation.
"""

LEVEL_1: dict[str, str] = {
    "1 square matrix multiplication": "matmul 256 256 256",
    "2 standard matrix multiplication": "matmul 128 256 512",
    "3 batched matrix multiplication": "batch_matmul 4 64 256 128",
    "4 matrix-vector multiplication": "matmul 256 1 16384",
    "6 matrix multiplication, large K": "matmul 64 64 4096",
    "7 matrix multiplication, small K": "matmul 512 512 32",
    "8 matrix multiplication, irregular": "matmul 257 185 369",
    "9 tall and skinny matrix multiplication": "matmul 768 768 16",
    "10 three-dimensional tensor times matrix": "matmul 1024 96 128",
    "11 four-dimensional tensor times matrix": "matmul 2048 96 64",
    "19 relu": "relu 16 16384",
    "23 softmax": "softmax 16 16384",
    "42 max pooling": "pooling 1 32 128 2 2",
    "47 sum over a dimension": "reduce 16 256 256",
    "50 convolution, first layer of AlexNet": "conv_2d_nchw 1 3 115 48 11 4",
    "63 convolution, square": "conv_2d_nchw 1 3 66 64 3",
    "63 convolution, square, channels last": "conv_2d_nhwc 1 3 66 64 3",
    "87 convolution, pointwise": "conv_2d_nchw 1 16 64 64 1",
}
"""Number and name of a problem → a line of sizes."""
