// Latent attention over the latents themselves (DeepSeek-V2, 2024): all heads attend over one key, a token's normed
// latent and what is rotated of it, whose first numbers are the value. `LatentHeads` of engine/weights/latent_heads.py
// and the model's own code are the plain path: the same operations, so the same bits.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/tensor.h"
#include "layers/attention.h"
#include "moe/experts.h"

namespace twostep {

// Which columns are rotated together: those of two halves, or neighbours, which may lie in two halves then.
enum class Rotated { kHalves, kPairs, kPairsApart };

inline Rotated rotated_named(const std::string& name) {
  if (name == "halves") return Rotated::kHalves;
  if (name == "pairs") return Rotated::kPairs;
  TWOSTEP_CHECK(name == "pairs apart", "the rotation of ", name, " is not known");
  return Rotated::kPairsApart;
}

struct LatentAttention : Attention {
  std::optional<Ref<Linear>> query_down;  // what queries are made of, if not of the layer's rows
  OptionalNorm query_norm;                // of that
  Ref<Linear> query, latent;
  Ref<Norm> latent_norm;
  Ref<moe::Stack> keys, values;  // matrices of each head, that its queries and its sums of latents are multiplied by
  Rotated rotated;

  LatentAttention(OptionalNorm input_norm, std::optional<Ref<Linear>> query_down, OptionalNorm query_norm,
                  Ref<Linear> query, Ref<Linear> latent, Ref<Norm> latent_norm, Ref<moe::Stack> keys,
                  Ref<moe::Stack> values, const std::string& rotated)
      : Attention(std::move(input_norm)), query_down(std::move(query_down)), query_norm(std::move(query_norm)),
        query(std::move(query)), latent(std::move(latent)), latent_norm(std::move(latent_norm)),
        keys(std::move(keys)), values(std::move(values)), rotated(rotated_named(rotated)) {
    TWOSTEP_CHECK(this->query_down.has_value() == this->query_norm.has_value(), "what queries are made of is normed");
    TWOSTEP_CHECK(!this->latent_norm->is_centered, "latents have an RMSNorm");
    TWOSTEP_CHECK(this->keys->weights.size() == this->values->weights.size(), "each head has two matrices");
  }

  Heads project(const Tensor& normed, const Angles& angles, Workspace& work, const AdapterRows& rows) const override;

  Tensor finished(const Tensor& attended, const Workspace& work) const override;

  std::vector<Ref<Linear>> linears() const override {
    if (query_down) return {*query_down, query, latent};
    return {query, latent};
  }

 private:
  int64_t num_heads() const { return static_cast<int64_t>(keys->weights.size()); }
  Tensor queries_of(const Tensor& normed, const Workspace& work, const AdapterRows& rows) const;
};

}  // namespace twostep
