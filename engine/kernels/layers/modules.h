// Linear layers and norms, as layers hold them, and the memory that layers compute in.

#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/operators.h"
#include "base/ref.h"
#include "base/tensor.h"
#include "layers/adapters.h"
#include "ranks/exchange.h"

namespace twostep {

using OptionalTensor = std::optional<Tensor>;

// A linear layer with a packed weight of 8 or 4 bits, or 0 if it is not quantized, and what adapters add to it. Where
// it is one rank's part of a layer, with some of its columns, all ranks' columns of the rows may be gathered before,
// and those of the product after; adapters add to the rank's columns, between both. Columns of a whole layer's product
// may be multiplied by factors then.
struct Linear {
  Tensor packed;
  OptionalTensor bias;
  int64_t out_features, bits;
  ranks::OptionalGather before, after;
  OptionalTensor factors;  // [out_features], float32
  std::vector<AdaptedColumns> adapted;

  Linear(Tensor packed, OptionalTensor bias, int64_t out_features, int64_t bits, ranks::OptionalGather before,
         ranks::OptionalGather after, OptionalTensor factors)
      : packed(std::move(packed)), bias(std::move(bias)), out_features(out_features), bits(bits),
        before(std::move(before)), after(std::move(after)), factors(std::move(factors)) {
    TWOSTEP_CHECK(!this->factors || (!this->before && !this->after), "only a whole layer's product has factors");
  }

  Tensor operator()(const Tensor& x, const Buffer& out, Activation activation = Activation::kNone) const {
    if (factors && activation != Activation::kNone) return gate(scaled(multiply(x, {}, kPlain)), activation, out);
    if (factors) return scaled(multiply(x, out, kPlain));
    if (!before && !after) return multiply(x, out, activation);
    TWOSTEP_CHECK(!after || activation == Activation::kNone, "only a rank's own columns are gated");
    const Tensor rows = before ? (**before)(x, {}) : x;
    return after ? (**after)(multiply(rows, {}, activation), out) : multiply(rows, out, activation);
  }

  Tensor operator()(const Tensor& x, const Buffer& out, Activation activation, const AdapterRows& rows) const {
    if (rows.empty() || adapted.empty()) return (*this)(x, out, activation);
    const bool is_gated = activation != Activation::kNone;
    TWOSTEP_CHECK(!after || !is_gated, "only a rank's own columns are gated");
    const Tensor whole = before ? (**before)(x, {}) : x;
    const Tensor sums = multiply(whole, is_gated || after ? Buffer() : out, Activation::kNone);
    add_adapted(adapted, whole, sums, rows);
    if (factors) scaled(sums);
    if (after) return (**after)(sums, out);
    return is_gated ? gate(sums, activation, out) : sums;
  }

  // Gives columns of the layer an adapter's factors: down packed of [rank, K], up packed of [columns, rank].
  void adapt(int64_t adapter, const Tensor& columns, const Tensor& down, const Tensor& up, int64_t rank) {
    auto found = std::find_if(adapted.begin(), adapted.end(), [&](const auto& each) { return each.are(columns); });
    if (found == adapted.end()) found = adapted.emplace(adapted.end(), columns);
    found->set(adapter, down, up, rank);
  }

  void release(int64_t adapter) {
    for (AdaptedColumns& each : adapted) each.release(adapter);
  }

 private:
  static constexpr Activation kPlain = Activation::kNone;

  // Multiplies a product by the factors, in its place.
  const Tensor& scaled(const Tensor& product) const {
    scale_columns(product, *factors);
    return product;
  }

  Tensor multiply(const Tensor& x, const Buffer& out, Activation activation) const {
    const auto& multiply = bits == 8 ? linear_int8 : bits == 4 ? linear_int4 : linear;
    return multiply(x, packed, bias, out_features, activation, out);
  }
};

// An RMSNorm, or a layer norm, which takes the mean away and may have a bias.
struct Norm {
  Tensor weight;
  double eps;
  bool is_centered;
  OptionalTensor bias;

  Norm(Tensor weight, double eps, bool is_centered, OptionalTensor bias)
      : weight(std::move(weight)), eps(eps), is_centered(is_centered), bias(std::move(bias)) {}

  Tensor operator()(const Tensor& x, const Buffer& out = {}) const {
    return is_centered ? layer_norm(x, weight, bias, eps, out) : rms_norm(x, weight, eps, out);
  }

  // Writes the norm of x [T, H] in its place.
  Tensor in_place(const Tensor& x) const { return (*this)(x, Buffer(x)); }

  // Returns residual + x, and the norm of that sum.
  std::tuple<Tensor, Tensor> add_and_norm(const Tensor& residual, const Tensor& x, const Buffer& sum,
                                          const Buffer& normed) const {
    if (!is_centered) return add_rms_norm(residual, x, weight, eps, sum, normed);
    const Tensor total = add_rows(residual, x, sum);
    return {total, (*this)(total, normed)};
  }
};

using OptionalNorm = std::optional<Ref<Norm>>;

// Returns residual + x, and the norm of that sum: without a norm the sum itself.
inline std::tuple<Tensor, Tensor> add_and_norm(const OptionalNorm& norm, const Tensor& residual, const Tensor& x,
                                               const Buffer& sum, const Buffer& normed) {
  if (norm) return (*norm)->add_and_norm(residual, x, sum, normed);
  const Tensor total = add_rows(residual, x, sum);
  return {total, total};
}

// Splits rows that have the heads of queries, keys and values side by side: [T, heads, head_size] each.
struct Heads {
  Tensor query, key, value;
  Tensor gates = {};  // [T, num_heads * head_size], whose sigmoids multiply what is attended to, if there are some
};

// Intermediate results of a layer, which the next layer overwrites.
class Workspace {
 public:
  Buffer qkv, attended, residual, normed, gated, added, mixed;
  Buffer query_down, latents, plain, query, key, absorbed, sums, expanded, values;  // of latent attention

  // Views of `qkv`, which are kept as long as it is.
  const Heads& heads_of(const Tensor& rows, int64_t num_heads, int64_t num_kv_heads) {
    if (!viewed_.is_same(rows) || heads_.query.size(1) != num_heads || heads_.key.size(1) != num_kv_heads) {
      const Tensor all = rows.view({rows.size(0), num_heads + 2 * num_kv_heads, -1});
      heads_ = {all.narrow(1, 0, num_heads), all.narrow(1, num_heads, num_kv_heads),
                all.narrow(1, num_heads + num_kv_heads, num_kv_heads)};
      viewed_ = rows;
    }
    return heads_;
  }

 private:
  Tensor viewed_;
  Heads heads_;
};

}  // namespace twostep
