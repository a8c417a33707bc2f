// The input gradient of convolutions on FPGAs: dx[ci][image and pixel] = w[tap][ci] dy[tap][image and pixel], a batch for each
// group. Taps count output channels.

#define OPERANDS __global const float* restrict dy, __global const float* restrict w
#define BIAS __global const float* restrict bias, const int has_bias

#define W_OF(k) ((group * LANES + (k) / TAPS) * CHANNELS_IN * TAPS + (k) % TAPS)
#define K_PLACE(k) TAP_PLACE(k) + (int4)(0, 0, 0, W_OF(k))
#define COL_PLACE(col) window_place(col, PIXELS, width, out_channels, group * LANES, (int2)(1), -PAD)
#define A(row, k) w[(k).w + (row) * TAPS]
#define B(k, col) \
  dy_at(dy, (col).x + (k).x, (col).y - (k).y, (col).z - (k).z, stride_h, stride_w, out_height, out_width)
#define A_ALONG_K true
#define B_ALONG_K false
#define FINISH(row, col, sum)                                             \
  const int number = group * CHANNELS_IN + (row);                         \
  KEEP(((col) / PIXELS * in_channels + number) * PIXELS + (col) % PIXELS, \
        has_bias ? (sum) + bias[number] : (sum));

#ifdef CHANNELS
SINGLE __kernel void convolution_input_load(OPERANDS, SHAPE, PROBLEM) { LOADS }
SINGLE __kernel void convolution_input_store(BIAS, SHAPE, PROBLEM, RESULTS) { STORES }
#else
SINGLE __kernel void convolution_input(OPERANDS, BIAS, SHAPE, PROBLEM, RESULTS) { WHOLE }
#endif
