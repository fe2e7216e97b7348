// Layers of hybrids that are not an attention and an MLP, one after the other: those of one part, and those that mix
// tokens recurrently beside their attention. They are called once or twice, around what mixes tokens.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/operators.h"
#include "base/ref.h"
#include "base/tensor.h"
#include "layers/decoder_layer.h"
#include "layers/feed_forward.h"
#include "layers/modules.h"
#include "layers/rotary.h"

namespace twostep {

// A linear layer of a norm.
struct NormedLinear {
  Ref<Norm> norm;
  Ref<Linear> linear;

  NormedLinear(Ref<Norm> norm, Ref<Linear> linear) : norm(std::move(norm)), linear(std::move(linear)) {}

  // x [1, T, H] -> [T, N]
  Tensor run(const Tensor& x) const { return (*linear)((*norm)(x[0]), {}); }
};

// A linear layer whose product is added to the residual.
struct AddedLinear {
  Ref<Linear> linear;

  explicit AddedLinear(Ref<Linear> linear) : linear(std::move(linear)) {}

  // x [1, T, H], mixed [T, ...] -> [1, T, H]
  Tensor run(const Tensor& x, const Tensor& mixed) const {
    return add_rows(x[0], (*linear)(mixed.flatten(1), {})).unsqueeze(0);
  }
};

// An MLP, or a mixture of experts, of a norm, which is added to the residual.
struct AddedFeedForward {
  Ref<Norm> norm;
  Ref<FeedForward> feed_forward;

  AddedFeedForward(Ref<Norm> norm, Ref<FeedForward> feed_forward)
      : norm(std::move(norm)), feed_forward(std::move(feed_forward)) {}

  // x [1, T, H] -> [1, T, H]
  Tensor run(const Tensor& x) const {
    const Workspace work;
    return add_rows(x[0], (*feed_forward)(x[0], (*norm)(x[0]), work, {})).unsqueeze(0);
  }
};

inline Ref<AddedFeedForward> added_feed_forward_of(Ref<Norm> norm, std::optional<Ref<Mlp>> mlp,
                                                   std::optional<Ref<Mixture>> mixture) {
  TWOSTEP_CHECK(mlp.has_value() != mixture.has_value(), "a layer has an MLP or a mixture");
  const Ref<FeedForward> feed_forward = mlp ? Ref<FeedForward>(*mlp) : Ref<FeedForward>(*mixture);
  return std::make_shared<AddedFeedForward>(std::move(norm), feed_forward);
}

// What makes of a norm the heads of an attention, and the rows of a recurrent mixer beside it.
struct BeforeBoth {
  Ref<Norm> norm;
  Ref<BeforeAttention> attention;  // without a norm of its own
  double attention_factor;         // what its rows are multiplied by
  Ref<Linear> recurrent;
  double recurrent_factor;

  BeforeBoth(Ref<Norm> norm, Ref<BeforeAttention> attention, double attention_factor, Ref<Linear> recurrent,
             double recurrent_factor)
      : norm(std::move(norm)), attention(std::move(attention)), attention_factor(attention_factor),
        recurrent(std::move(recurrent)), recurrent_factor(recurrent_factor) {
    TWOSTEP_CHECK(!this->attention->input_norm, "both read one norm");
  }

  // x [1, T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], rows of the mixer
  std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& x, const Tensor& cos, const Tensor& sin) const {
    Workspace work;
    const Tensor normed = (*norm)(x[0]);
    const Heads heads = attention->project(scaled(normed, attention_factor), {cos, sin, {}}, work, {});
    return {heads.query, heads.key, heads.value, (*recurrent)(scaled(normed, recurrent_factor), {})};
  }

 private:
  static Tensor scaled(const Tensor& rows, double factor) {
    if (factor == 1.0) return rows;
    const Tensor copy = rows.clone();
    scale_rows(copy, factor);
    return copy;
  }
};

// What follows both: their sum is what an attention alone would add.
struct AfterBoth {
  Ref<AfterAttention> after;
  Ref<Linear> recurrent_out;

  AfterBoth(Ref<AfterAttention> after, Ref<Linear> recurrent_out)
      : after(std::move(after)), recurrent_out(std::move(recurrent_out)) {}

  // x [1, T, H], attended [T, num_heads, head_size], mixed [T, N] -> [1, T, H]
  Tensor run(const Tensor& x, const Tensor& attended, const Tensor& mixed) const {
    Workspace work;
    const Tensor sum = add_rows((*recurrent_out)(mixed, {}), after->projected(attended.flatten(1), work, {}));
    const auto [residual, added] = after->of_projected(x[0], sum, work, {});
    return add_rows(residual, added).unsqueeze(0);
  }
};

}  // namespace twostep
