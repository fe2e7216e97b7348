// A decoder layer in two operators, one on each side of its attention: between two products only C++ runs. They call
// the operators that the plain path calls from Python, in the same order.

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "operators.h"

namespace twostep {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A packed weight of 8 or 4 bits, or of 0 where it is not quantized.
struct Linear : torch::CustomClassHolder {
  at::Tensor packed;
  OptionalTensor bias;
  int64_t out_features, bits;

  Linear(at::Tensor packed, OptionalTensor bias, int64_t out_features, int64_t bits)
      : packed(std::move(packed)), bias(std::move(bias)), out_features(out_features), bits(bits) {}

  at::Tensor operator()(const at::Tensor& x, Activation activation = Activation::kNone) const {
    const auto& multiply = bits == 8 ? linear_int8 : bits == 4 ? linear_int4 : linear;
    return multiply(x, packed, bias, out_features, activation);
  }
};

struct Norm : torch::CustomClassHolder {
  at::Tensor weight;
  double eps;

  Norm(at::Tensor weight, double eps) : weight(std::move(weight)), eps(eps) {}
};

template <class T>
using Ref = c10::intrusive_ptr<T>;

struct Attention : torch::CustomClassHolder {
  Ref<Norm> input_norm;
  std::optional<Ref<Norm>> query_norm, key_norm;
  Ref<Linear> qkv;
  int64_t num_heads, num_kv_heads;

  Attention(Ref<Norm> input_norm, std::optional<Ref<Norm>> query_norm, std::optional<Ref<Norm>> key_norm,
            Ref<Linear> qkv, int64_t num_heads, int64_t num_kv_heads)
      : input_norm(std::move(input_norm)), query_norm(std::move(query_norm)), key_norm(std::move(key_norm)),
        qkv(std::move(qkv)), num_heads(num_heads), num_kv_heads(num_kv_heads) {}
};

struct MLP : torch::CustomClassHolder {
  Ref<Linear> attention_out;
  Ref<Norm> norm;
  Ref<Linear> gate_up, down;
  Activation activation;

  MLP(Ref<Linear> attention_out, Ref<Norm> norm, Ref<Linear> gate_up, Ref<Linear> down, const std::string& activation)
      : attention_out(std::move(attention_out)), norm(std::move(norm)), gate_up(std::move(gate_up)),
        down(std::move(down)), activation(activation_named(activation)) {}
};

// x [1, T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size]
std::tuple<at::Tensor, at::Tensor, at::Tensor> before_attention(const Ref<Attention>& layer, const at::Tensor& x,
                                                                const at::Tensor& cos, const at::Tensor& sin) {
  const auto weight_of = [](const auto& norm) { return norm ? OptionalTensor((*norm)->weight) : std::nullopt; };
  const int64_t rows = x.size(1), heads = layer->num_heads, kv_heads = layer->num_kv_heads;
  at::Tensor qkv = (*layer->qkv)(rms_norm(x, layer->input_norm->weight, layer->input_norm->eps)[0]);
  rotate_heads(qkv, cos, sin, heads, kv_heads, weight_of(layer->query_norm), weight_of(layer->key_norm),
               layer->query_norm ? (*layer->query_norm)->eps : 0.0);
  const at::Tensor all = qkv.view({rows, heads + 2 * kv_heads, -1});
  return {all.narrow(1, 0, heads), all.narrow(1, heads, kv_heads), all.narrow(1, heads + kv_heads, kv_heads)};
}

// x [1, T, H], attended [T, num_heads, head_size] -> the layer's output [1, T, H]
at::Tensor after_attention(const Ref<MLP>& layer, const at::Tensor& x, const at::Tensor& attended) {
  const at::Tensor attention = (*layer->attention_out)(attended.flatten(1));
  const auto [residual, normed] = add_rms_norm(x, attention.unsqueeze(0), layer->norm->weight, layer->norm->eps);
  const at::Tensor gated = (*layer->gate_up)(normed[0], layer->activation);
  return residual + (*layer->down)(gated).unsqueeze(0);
}

}  // namespace
}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  using namespace twostep;
  library.class_<Linear>("Linear").def(torch::init<at::Tensor, OptionalTensor, int64_t, int64_t>());
  library.class_<Norm>("Norm").def(torch::init<at::Tensor, double>());
  library.class_<Attention>("Attention")
      .def(torch::init<Ref<Norm>, std::optional<Ref<Norm>>, std::optional<Ref<Norm>>, Ref<Linear>, int64_t, int64_t>());
  library.class_<MLP>("MLP").def(torch::init<Ref<Linear>, Ref<Norm>, Ref<Linear>, Ref<Linear>, std::string>());
  library.def("before_attention", &before_attention);
  library.def("after_attention", &after_attention);
}
