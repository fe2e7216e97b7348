// A decoder layer around its attention: what makes queries, keys and values, and what is done with what they attend to.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "layers/attention.h"
#include "layers/feed_forward.h"
#include "layers/layer_end.h"
#include "layers/modules.h"
#include "layers/rotary.h"
#include "recurrent/operators.h"

namespace twostep {

// Where values come from: from columns of their own, from those of keys, or from another layer, as keys do then.
enum class Values { kProjected, kOfKeys, kOfAnotherLayer };

inline Values values_named(const std::string& name) {
  if (name == "projected") return Values::kProjected;
  if (name == "of keys") return Values::kOfKeys;
  TWOSTEP_CHECK(name == "of another layer", "values ", name, " are not known");
  return Values::kOfAnotherLayer;
}

struct BeforeAttention : Attention {
  OptionalNorm query_norm, key_norm, value_norm;
  Ref<Linear> qkv;  // of queries alone, or of queries and keys, where there is nothing else to project; and of gates
  int64_t num_heads, num_kv_heads;
  Values values;
  bool in_pairs;    // whether neighbours are rotated
  bool norms_last;  // whether what is rotated is normed, and not the other way round
  bool is_gated;    // whether the last columns of `qkv`, as many as those of queries, are gates

  BeforeAttention(OptionalNorm input_norm, OptionalNorm query_norm, OptionalNorm key_norm, OptionalNorm value_norm,
                  Ref<Linear> qkv, int64_t num_heads, int64_t num_kv_heads, const std::string& values, bool in_pairs,
                  bool norms_last, bool is_gated)
      : Attention(std::move(input_norm)), query_norm(std::move(query_norm)), key_norm(std::move(key_norm)),
        value_norm(std::move(value_norm)), qkv(std::move(qkv)), num_heads(num_heads), num_kv_heads(num_kv_heads),
        values(values_named(values)), in_pairs(in_pairs), norms_last(norms_last), is_gated(is_gated) {
    const auto is_centered = [](const auto& norm) { return norm && (*norm)->is_centered; };
    const bool are_centered = is_centered(this->query_norm);
    TWOSTEP_CHECK(are_centered == is_centered(this->key_norm), "norms of queries and keys are of one kind");
    TWOSTEP_CHECK(!are_centered || (!norms_last && this->values == Values::kProjected),
                  "heads that have layer norms have them first, and values of their own");
  }

  bool takes_keys_of_others() const override { return values == Values::kOfAnotherLayer; }

  std::vector<Ref<Linear>> linears() const override { return {qkv}; }

  Heads project(const Tensor& normed, const Angles& angles, Workspace& work, const AdapterRows& rows) const override {
    const Tensor all = (*qkv)(normed, work.qkv, Activation::kNone, rows);
    if (!is_gated) return heads_of(all, angles, work);
    const int64_t num_projected = num_heads + num_kv_heads * num_of_kv();
    const int64_t size = all.size(1) / (num_projected + num_heads);
    Heads heads = heads_of(all.narrow(1, 0, num_projected * size), angles, work);
    heads.gates = all.narrow(1, num_projected * size, num_heads * size);
    return heads;
  }

 private:
  // Splits the rows of the projection, and norms and rotates their heads.
  Heads heads_of(Tensor all, const Angles& angles, Workspace& work) const {
    if (values == Values::kOfKeys) return with_values_of_keys(all, angles);
    const int64_t kv_heads = values == Values::kProjected ? num_kv_heads : 0;
    rotate(all, angles, num_heads, kv_heads, query_norm, key_norm, angles.query_scales);
    if (kv_heads == 0) return {all.view({all.size(0), num_heads, all.size(1) / num_heads}), {}, {}};
    Heads heads = work.heads_of(all, num_heads, num_kv_heads);
    if (value_norm) heads.value = (**value_norm)(heads.value);
    return heads;
  }

  // Of keys and values, how many are projected.
  int64_t num_of_kv() const { return values == Values::kProjected ? 2 : values == Values::kOfKeys ? 1 : 0; }

  // Queries and keys lie in the columns of `all`. Values are what keys are before they are normed and rotated.
  Heads with_values_of_keys(const Tensor& all, const Angles& angles) const {
    const int64_t num_both = num_heads + num_kv_heads;
    const Tensor heads = all.view({all.size(0), num_both, all.size(1) / num_both});
    const Tensor query = heads.narrow(1, 0, num_heads), key = heads.narrow(1, num_heads, num_kv_heads);
    const Tensor value = value_norm ? (**value_norm)(key) : key.clone();
    Tensor queries = all.narrow(1, 0, num_heads * heads.size(2));
    Tensor keys = all.narrow(1, queries.size(1), num_kv_heads * heads.size(2));
    rotate(queries, angles, num_heads, 0, query_norm, {}, angles.query_scales);
    rotate(keys, angles, num_kv_heads, 0, key_norm, {}, {});
    return {query, key, value};
  }

  void rotate(Tensor& rows, const Angles& angles, int64_t num_heads, int64_t num_kv_heads,
              const OptionalNorm& query_norm, const OptionalNorm& key_norm, const OptionalTensor& query_scales) const {
    if (query_norm && (*query_norm)->is_centered) {
      norm_part(rows, 0, num_heads, num_heads + 2 * num_kv_heads, **query_norm);
      norm_part(rows, num_heads, num_kv_heads, num_heads + 2 * num_kv_heads, **key_norm);
      return rotate(rows, angles, num_heads, num_kv_heads, {}, {}, query_scales);
    }
    const auto weight_of = [](const auto& norm) { return norm ? OptionalTensor((*norm)->weight) : std::nullopt; };
    rotate_heads(rows, angles.cos, angles.sin, num_heads, num_kv_heads, weight_of(query_norm), weight_of(key_norm),
                 query_norm ? (*query_norm)->eps : 0.0, in_pairs, norms_last, query_scales);
  }

  // Norms `count` of all heads of rows, from the `first` one, in place.
  static void norm_part(const Tensor& rows, int64_t first, int64_t count, int64_t all, const Norm& norm) {
    norm_heads(rows.view({rows.size(0), all, -1}).narrow(1, first, count), norm.weight, norm.bias, norm.eps);
  }
};

// attended [T, N], gates [T, N], if there are some -> what is attended to times their sigmoids, in its place
inline Tensor gated(const Tensor& attended, const Tensor& gates) {
  if (gates.defined()) recurrent::multiply_by_gates(attended, gates, "sigmoid");
  return attended;
}

struct AfterAttention {
  Ref<Linear> attention_out;
  OptionalNorm norm;
  Ref<FeedForward> feed_forward;
  OptionalNorm attention_norm, feed_forward_norm;  // of what either adds to the residual
  std::optional<double> multiplier;                // of that
  bool is_parallel;                                // whether the MLP reads a norm of what attention does, too
  bool adds_first;                                 // whether what both make is added before the residual
  OptionalEnd end;

  AfterAttention(Ref<Linear> attention_out, OptionalNorm norm, Ref<FeedForward> feed_forward,
                 OptionalNorm attention_norm, OptionalNorm feed_forward_norm, std::optional<double> multiplier,
                 bool is_parallel, bool adds_first, OptionalEnd end)
      : attention_out(std::move(attention_out)), norm(std::move(norm)), feed_forward(std::move(feed_forward)),
        attention_norm(std::move(attention_norm)), feed_forward_norm(std::move(feed_forward_norm)),
        multiplier(multiplier), is_parallel(is_parallel), adds_first(adds_first), end(std::move(end)) {}

  std::vector<Ref<Linear>> linears_of_end() const { return end ? (*end)->linears() : std::vector<Ref<Linear>>{}; }

  // x [T, H], attended [T, num_heads * head_size] -> both [T, H]: their sum is the layer's output, but for its end
  std::tuple<Tensor, Tensor> operator()(const Tensor& x, const Tensor& attended, Workspace& work,
                                        const AdapterRows& rows) const {
    return of_projected(x, finished(attention_norm, projected(attended, work, rows)), work, rows);
  }

  Tensor projected(const Tensor& attended, const Workspace& work, const AdapterRows& rows) const {
    return (*attention_out)(attended, adds_first ? work.mixed : work.added, Activation::kNone, rows);
  }

  // x [T, H], what is added to it first [T, H] -> as above
  std::tuple<Tensor, Tensor> of_projected(const Tensor& x, const Tensor& first, Workspace& work,
                                          const AdapterRows& rows) const {
    Tensor residual, normed;
    if (adds_first) {
      normed = (**norm)(x, work.normed);
      const Tensor fed = finished(feed_forward_norm, (*feed_forward)(x, normed, work, rows));
      return {x, add_rows(first, fed, work.mixed)};
    }
    if (is_parallel) {
      normed = (**norm)(x, work.normed);
      residual = add_rows(x, first, work.residual);
    } else {
      std::tie(residual, normed) = add_and_norm(norm, x, first, work.residual, work.normed);
    }
    return {residual, finished(feed_forward_norm, (*feed_forward)(residual, normed, work, rows))};
  }

 private:
  // Makes of a product what is added to the residual, in its place.
  Tensor finished(const OptionalNorm& norm, const Tensor& rows) const {
    const Tensor normed = norm ? (*norm)->in_place(rows) : rows;
    if (multiplier) scale_rows(normed, *multiplier);
    return normed;
  }
};

// A layer's feed-forward part is an MLP or a mixture: one of both.
inline Ref<AfterAttention> after_attention_of(Ref<Linear> attention_out, OptionalNorm norm,
                                              std::optional<Ref<Mlp>> mlp, std::optional<Ref<Mixture>> mixture,
                                              OptionalNorm attention_norm, OptionalNorm feed_forward_norm,
                                              std::optional<double> multiplier, bool is_parallel, bool adds_first,
                                              OptionalEnd end) {
  TWOSTEP_CHECK(mlp.has_value() != mixture.has_value(), "a layer has an MLP or a mixture");
  TWOSTEP_CHECK(norm || !is_parallel, "a layer whose parts are parallel has a norm");
  TWOSTEP_CHECK(is_parallel || !adds_first, "only what parallel parts make is added first");
  const Ref<FeedForward> feed_forward = mlp ? Ref<FeedForward>(*mlp) : Ref<FeedForward>(*mixture);
  return std::make_shared<AfterAttention>(std::move(attention_out), std::move(norm), feed_forward,
                                          std::move(attention_norm), std::move(feed_forward_norm), multiplier,
                                          is_parallel, adds_first, std::move(end));
}

}  // namespace twostep
