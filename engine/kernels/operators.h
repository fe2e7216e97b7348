// The operators that other kernels are made of; torch knows them under the same names.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

namespace twostep {

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n);
at::Tensor linear_quantized(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t n, int64_t bits);

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& residual, const at::Tensor& x,
                                                const at::Tensor& weight, double eps);
void rotate_heads(at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t num_heads,
                  int64_t num_kv_heads, const std::optional<at::Tensor>& query_norm,
                  const std::optional<at::Tensor>& key_norm, double eps);
at::Tensor gate(const at::Tensor& gate_up, std::string_view activation);

}  // namespace twostep
