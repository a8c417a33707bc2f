// Places of elements in convolutions, for kernels/patches.cl: the place of a row or column plus the place of a k.

// (first plane of the image and group, row, column) where the window of pixel `at` of y begins; an image has `planes` planes.
inline int4 window_place(const int at, const int pixels, const int width, const int planes, const int first,
                         const int2 stride, const int2 pad) {
  const int pixel = at % pixels;
  return (int4)(at / pixels * planes + first, pixel / width * stride.x - pad.x, pixel % width * stride.y - pad.y, 0);
}

// (channel of the group, row, column), relative to the window; `at` counts the taps of all channels.
inline int4 tap_place(const int at, const int taps, const int kernel_w, const int2 dilation) {
  const int tap = at % taps;
  return (int4)(at / taps, tap / kernel_w * dilation.x, tap % kernel_w * dilation.y, 0);
}

#define STRIDE (int2)(stride_h, stride_w)
#define PAD (int2)(pad_h, pad_w)
#define DILATION (int2)(dilation_h, dilation_w)
#define TAP_PLACE(at) tap_place(at, TAPS, kernel_w, DILATION)
#define group batch
