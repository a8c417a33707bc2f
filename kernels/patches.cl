// Convolutions as products that read patches directly from the images, without a copy of the images. Prepended to the files of
// kernels/gpu and kernels/fpga.
//
//   forward          y[co][pixel of y]  = w[co][tap]    x[tap][pixel of y]     sums over ci and taps
//   input gradient   dx[ci][pixel of x] = w[tap][ci]   dy[tap][pixel of x]     sums over co and taps
//   weight gradient  dw[co][tap]        = dy[co][pixel] x[pixel][tap]          sums over images and pixels of y
//
// No name here is `channel`, a keyword on devices that have channels.
// A column or a k is one number. It counts the pixels of all images (image * height * width + row * width + col), or the taps
// of all channels of the `group`. Tensors are [N][C][H][W], weights [Co][Ci / groups][kh][kw].

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

// An element of a plane; 0 in the border.
inline float x_at(__global const float* x, const int plane, const int row, const int col, const int height,
                  const int width) {
  return row >= 0 && row < height && col >= 0 && col < width ? x[(plane * height + row) * width + col] : 0.0f;
}

// An element of dy; `row` and `col` are its place times the stride. 0 if there is no such element.
inline float dy_at(__global const float* dy, const int plane, const int row, const int col, const int stride_h,
                   const int stride_w, const int out_height, const int out_width) {
  const int r = row / stride_h, c = col / stride_w;
  const bool there = row >= 0 && col >= 0 && r * stride_h == row && c * stride_w == col;
  return there && r < out_height && c < out_width ? dy[(plane * out_height + r) * out_width + c] : 0.0f;
}
