// The backward of kernels/gpu/lstm.cl, one time step at a time.
//
//   gates, grad_gates  [T][N][4H]    c, grad_y  [T][N][H]    c0, grad_c0, grad_last_c  [N][H]
//   grad_h             [parts][N][H], parts of the gradient of h from the next step: a product of matmul.cl
//
// grad_c0 carries the gradient of the cells from step to step.

#define GATES 4

// In the last step `parts` is 0. global size: N * H, rounded up to whole work-groups
__kernel void lstm_gradients(__global const float* grad_y, __global const float* grad_last_c, const int has_grad_last_c,
                             __global const float* gates, __global const float* c, __global const float* c0,
                             __global const float* grad_h, const int parts, __global float* grad_gates,
                             __global float* grad_c0, const int step, const int steps, const int batch,
                             const int hidden) {
  const int place = get_global_id(0), size = batch * hidden;
  if (place >= size) return;
  const int at = (step * batch + place / hidden) * GATES * hidden + place % hidden, here = step * size + place;
  const float i = gates[at], f = gates[at + hidden], g = gates[at + 2 * hidden], o = gates[at + 3 * hidden];
  const float squashed = tanh(c[here]), before = step == 0 ? c0[place] : c[here - size];
  float dh = grad_y[here], dc = has_grad_last_c ? grad_last_c[place] : 0.0f;
  if (step < steps - 1) dc = grad_c0[place];
  for (int part = 0; part < parts; part++) dh += grad_h[part * size + place];
  dc = fma(dh * o, 1.0f - squashed * squashed, dc);
  grad_gates[at] = dc * g * i * (1.0f - i);
  grad_gates[at + hidden] = dc * before * f * (1.0f - f);
  grad_gates[at + 2 * hidden] = dc * i * (1.0f - g * g);
  grad_gates[at + 3 * hidden] = dh * squashed * o * (1.0f - o);
  grad_c0[place] = dc * f;
}
