// Convolutions on GPUs: the products of kernels/patches.cl.
//
// global size: column tiles, row tiles (each times GROUP), splits * groups

// The element of x that pixel `at` of y reads for tap `tap` of a channel; 0 in the border.
#define X_AT(at, of, tap)                                                                              \
  x_at(x, ((at) / OUT_PIXELS) * in_channels + (of),                                                    \
       ((at) % OUT_PIXELS) / out_width * stride_h - pad_h + (tap) / kernel_w * dilation_h,                  \
       ((at) % out_width) * stride_w - pad_w + (tap) % kernel_w * dilation_w, height, width)

// The element of dy whose tap `tap` reads pixel `at` of x; 0 if there is no such element.
#define DY_AT(at, of, tap)                                                                             \
  dy_at(dy, ((at) / PIXELS) * out_channels + (of),                                                     \
        ((at) % PIXELS) / width + pad_h - (tap) / kernel_w * dilation_h,                                        \
        ((at) % width) + pad_w - (tap) % kernel_w * dilation_w, stride_h, stride_w, out_height, out_width)

#define GROUP_NUMBER ((int)get_group_id(2) % groups)
#define SPLIT ((int)get_group_id(2) / groups)

#define W_FORWARD(row, k) ((row) < LANES ? w[((group * LANES) + (row)) * CHANNELS_IN * TAPS + (k)] : 0.0f)
#define X_FORWARD(k, col) ((col) < columns ? X_AT(col, group * CHANNELS_IN + (k) / TAPS, (k) % TAPS) : 0.0f)

WORK_GROUP __kernel void forward(__global const float* x, __global const float* w, __global const float* bias,
                                 const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * OUT_PIXELS;
  MULTIPLY(W_FORWARD, true, X_FORWARD, false, 0, CHANNELS_IN * TAPS);
  EACH(LANES, columns)
    const int number = group * LANES + row;
    STORE((col / OUT_PIXELS * out_channels + number) * OUT_PIXELS + col % OUT_PIXELS,
          has_bias ? sum + bias[number] : sum);
  EACH_END
}

#define W_INPUT(row, k) \
  ((row) < CHANNELS_IN ? w[((group * LANES + (k) / TAPS) * CHANNELS_IN + (row)) * TAPS + (k) % TAPS] : 0.0f)
#define DY_INPUT(k, col) ((col) < columns ? DY_AT(col, group * LANES + (k) / TAPS, (k) % TAPS) : 0.0f)

WORK_GROUP __kernel void input_gradient(__global const float* dy, __global const float* w,
                                        __global const float* bias, const int has_bias, SHAPE, RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, columns = images * PIXELS;
  MULTIPLY(W_INPUT, true, DY_INPUT, false, 0, LANES * TAPS);
  EACH(CHANNELS_IN, columns)
    const int number = group * CHANNELS_IN + row;
    STORE((col / PIXELS * in_channels + number) * PIXELS + col % PIXELS, has_bias ? sum + bias[number] : sum);
  EACH_END
}

#define DY_WEIGHT(row, k)                                                                                \
  ((row) < LANES ? dy[((k) / OUT_PIXELS * out_channels + group * LANES + (row)) * OUT_PIXELS + (k) % OUT_PIXELS] : 0.0f)
#define X_WEIGHT(k, col) ((col) < CHANNELS_IN * TAPS ? X_AT(k, group * CHANNELS_IN + (col) / TAPS, (col) % TAPS) : 0.0f)

// dw [splits][Co][Ci / groups][kh][kw] has parts of the sums, which the caller adds
WORK_GROUP __kernel void weight_gradient(__global const float* dy, __global const float* x, SHAPE, const int each,
                                         RESULTS) {
  TILES;
  const int group = GROUP_NUMBER, split = SPLIT;
  MULTIPLY(DY_WEIGHT, true, X_WEIGHT, true, split * each, min(images * OUT_PIXELS, (split + 1) * each));
  EACH(LANES, CHANNELS_IN * TAPS)
    STORE(((split * out_channels + group * LANES + row) * CHANNELS_IN) * TAPS + col, sum);
  EACH_END
}
