// Convolutions on GPUs: matrix products whose operands are read at computed places, without a copy.
//
//   forward          y[co][pixel of y]  = w[co][tap]    x[tap][pixel of y]     sums over ci and taps
//   input gradient   dx[ci][pixel of x] = w[tap][ci]   dy[tap][pixel of x]     sums over co and taps
//   weight gradient  dw[co][tap]        = dy[co][pixel] x[pixel][tap]          sums over images and pixels of y
//
// (`channel` is a word of the language where a device has channels.)
// A column or a k is one number: an image with a pixel (image * height * width + row * width + col), or a channel of the
// group with a tap. Tensors are [N][C][H][W], weights [Co][Ci / groups][kh][kw].
// global size: column tiles, row tiles (each times GROUP), splits * groups

#define SHAPE                                                                                             \
  const int images, const int groups, const int in_channels, const int out_channels, const int height,     \
      const int width, const int out_height, const int out_width, const int kernel_h, const int kernel_w,  \
      const int stride_h, const int stride_w, const int pad_h, const int pad_w, const int dilation_h,             \
      const int dilation_w

#define TAPS (kernel_h * kernel_w)
#define PIXELS (height * width)
#define OUT_PIXELS (out_height * out_width)

// The element of x that pixel `at` of y reads for tap `tap` of a channel; 0 in the border.
#define X_AT(at, of, tap)                                                                              \
  x_at(x, ((at) / OUT_PIXELS) * in_channels + (of),                                                    \
       ((at) % OUT_PIXELS) / out_width * stride_h - pad_h + (tap) / kernel_w * dilation_h,                  \
       ((at) % out_width) * stride_w - pad_w + (tap) % kernel_w * dilation_w, height, width)

inline float x_at(__global const float* x, const int plane, const int row, const int col, const int height,
                  const int width) {
  return row >= 0 && row < height && col >= 0 && col < width ? x[(plane * height + row) * width + col] : 0.0f;
}

// The element of dy that pixel `at` of x is multiplied with in tap `tap`; 0 where there is none.
#define DY_AT(at, of, tap)                                                                             \
  dy_at(dy, ((at) / PIXELS) * out_channels + (of),                                                     \
        ((at) % PIXELS) / width + pad_h - (tap) / kernel_w * dilation_h,                                        \
        ((at) % width) + pad_w - (tap) % kernel_w * dilation_w, stride_h, stride_w, out_height, out_width)

inline float dy_at(__global const float* dy, const int plane, const int row, const int col, const int stride_h,
                   const int stride_w, const int out_height, const int out_width) {
  const int r = row / stride_h, c = col / stride_w;
  const bool there = row >= 0 && col >= 0 && r * stride_h == row && c * stride_w == col;
  return there && r < out_height && c < out_width ? dy[(plane * out_height + r) * out_width + c] : 0.0f;
}

#define GROUP_NUMBER ((int)get_group_id(2) % groups)
#define SPLIT ((int)get_group_id(2) / groups)
#define LANES (out_channels / groups)
#define CHANNELS (in_channels / groups)

#define W_FORWARD(row, k) ((row) < LANES ? w[((group * LANES) + (row)) * CHANNELS * TAPS + (k)] : 0.0f)
#define X_FORWARD(k, col) ((col) < columns ? X_AT(col, group * CHANNELS + (k) / TAPS, (k) % TAPS) : 0.0f)

WORK_GROUP __kernel void forward(__global const float* x, __global const float* w, __global const float* bias,
                                 const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * OUT_PIXELS;
  MULTIPLY(W_FORWARD, true, X_FORWARD, false, 0, CHANNELS * TAPS);
  EACH(LANES, columns)
    const int number = group * LANES + row;
    STORE((col / OUT_PIXELS * out_channels + number) * OUT_PIXELS + col % OUT_PIXELS,
          has_bias ? sum + bias[number] : sum);
  EACH_END
}

#define W_INPUT(row, k) \
  ((row) < CHANNELS ? w[((group * LANES + (k) / TAPS) * CHANNELS + (row)) * TAPS + (k) % TAPS] : 0.0f)
#define DY_INPUT(k, col) ((col) < columns ? DY_AT(col, group * LANES + (k) / TAPS, (k) % TAPS) : 0.0f)

WORK_GROUP __kernel void input_gradient(__global const float* dy, __global const float* w,
                                        __global const float* bias, const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * PIXELS;
  MULTIPLY(W_INPUT, true, DY_INPUT, false, 0, LANES * TAPS);
  EACH(CHANNELS, columns)
    const int number = group * CHANNELS + row;
    STORE((col / PIXELS * in_channels + number) * PIXELS + col % PIXELS, has_bias ? sum + bias[number] : sum);
  EACH_END
}

#define DY_WEIGHT(row, k)                                                                                \
  ((row) < LANES ? dy[((k) / OUT_PIXELS * out_channels + group * LANES + (row)) * OUT_PIXELS + (k) % OUT_PIXELS] : 0.0f)
#define X_WEIGHT(k, col) ((col) < CHANNELS * TAPS ? X_AT(k, group * CHANNELS + (col) / TAPS, (col) % TAPS) : 0.0f)

// dw [splits][Co][Ci / groups][kh][kw]: parts of the sums, to be added
WORK_GROUP __kernel void weight_gradient(__global const float* dy, __global const float* x, SHAPE, const int each,
                                         RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, split = SPLIT;
  MULTIPLY(DY_WEIGHT, true, X_WEIGHT, true, split * each, min(images * OUT_PIXELS, (split + 1) * each));
  EACH(LANES, CHANNELS * TAPS)
    STORE(((split * out_channels + group * LANES + row) * CHANNELS) * TAPS + col, sum);
  EACH_END
}
