// Convolutions as products whose operands are read at computed places: no copy of patches is made. Prepended to the files of
// kernels/gpu and kernels/fpga.
//
//   forward          y[co][pixel of y]  = w[co][tap]    x[tap][pixel of y]     sums over ci and taps
//   input gradient   dx[ci][pixel of x] = w[tap][ci]   dy[tap][pixel of x]     sums over co and taps
//   weight gradient  dw[co][tap]        = dy[co][pixel] x[pixel][tap]          sums over images and pixels of y
//
// (`channel` is a word of the language where a device has channels.)
// A column or a k is one number: an image with a pixel (image * height * width + row * width + col), or a channel of the
// `group` with a tap. Tensors are [N][C][H][W], weights [Co][Ci / groups][kh][kw].

#define SHAPE                                                                                             \
  const int images, const int groups, const int in_channels, const int out_channels, const int height,     \
      const int width, const int out_height, const int out_width, const int kernel_h, const int kernel_w,  \
      const int stride_h, const int stride_w, const int pad_h, const int pad_w, const int dilation_h,             \
      const int dilation_w

#define TAPS (kernel_h * kernel_w)
#define PIXELS (height * width)
#define OUT_PIXELS (out_height * out_width)
#define LANES (out_channels / groups)
#define CHANNELS_IN (in_channels / groups)

// An element of a plane, 0 in the border.
inline float x_at(__global const float* x, const int plane, const int row, const int col, const int height,
                  const int width) {
  return row >= 0 && row < height && col >= 0 && col < width ? x[(plane * height + row) * width + col] : 0.0f;
}

// Rows and columns of dy, times the stride.
inline float dy_at(__global const float* dy, const int plane, const int row, const int col, const int stride_h,
                   const int stride_w, const int out_height, const int out_width) {
  const int r = row / stride_h, c = col / stride_w;
  const bool there = row >= 0 && col >= 0 && r * stride_h == row && c * stride_w == col;
  return there && r < out_height && c < out_width ? dy[(plane * out_height + r) * out_width + c] : 0.0f;
}
