// Chooses the positions that sparse attention reads: of those that a token sees, the ones whose index keys score best.
//
// A score of a position is the sum over heads, in order, of weight * max(0, query . key), and each product a sum over
// the size in order. So it is, bit for bit, a function of the token's queries and weights and of that position's key,
// and the choice one of the scores: a better score comes first, and of equal ones the earlier position.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "attention/metadata.h"
#include "attention/vector.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/scratch.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {
namespace {

using attention::kTileKeys;
using attention::kTileVecs;

constexpr int64_t kPartKeys = 512;            // positions that one task scores
constexpr int64_t kScoresAtOnce = 1 << 22;    // kept at once: tokens of long contexts take turns
constexpr int64_t kSerialProducts = 1 << 18;  // below which a second thread does not pay

// A query token: its sequence's table, and how many positions it sees.
struct Token {
  const int32_t* table;
  int64_t num_seen;
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // Intel multiplies pairs at half the speed of float32
using HalfWords = attention::PairWords;
#else
using HalfWords = attention::WidenedWords;
#endif

template <class Element>
struct Index {
  using Words = std::conditional_t<std::is_same_v<Element, float>, attention::FloatWords, HalfWords>;
  using Tiles = attention::VectorTiles<Element, Words>;

  const Element* query;  // [tokens, num_heads, size]
  const float* weights;  // [tokens, num_heads]
  const Element* keys;   // [blocks, block_size, size]
  int64_t num_heads, size, block_size;

  int64_t num_words() const { return Tiles::query_words(size); }
  int64_t slot(const Token& token, int64_t position) const {
    return token.table[position / block_size] * block_size + position % block_size;
  }

  // Scores the positions [begin, end), which begin at a tile.
  void score(const Token& token, int64_t number, int64_t begin, int64_t end, float* scores) const {
    static thread_local Scratch<float> scratch;
    const int64_t words = num_words(), query_floats = round_up(num_heads * words, kLanes);
    float* queries = scratch.get(query_floats + words * kTileKeys + Tiles::kRowBlock * kTileKeys);
    float *tile = queries + query_floats, *products = tile + words * kTileKeys;
    std::fill_n(queries, query_floats + words * kTileKeys, 0.0f);  // words past the size stay zero
    for (int64_t head = 0; head < num_heads; ++head)
      Words::load_query(query + (number * num_heads + head) * size, size, queries + head * words);
    for (int64_t first = begin; first < end; first += kTileKeys) {
      load_tile(token, first, end, tile);
      score_tile(queries, weights + number * num_heads, tile, products, scores + first);
    }
  }

  // Positions behind the last one get a key that the token sees.
  void load_tile(const Token& token, int64_t first, int64_t end, float* tile) const {
    int64_t entries[kLanes];
    for (int64_t key = 0; key < kTileKeys; key += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) entries[i] = slot(token, std::min(first + key + i, end - 1));
      Tiles::load_keys(keys, size, size, entries, tile + key);
    }
  }

  void score_tile(const float* queries, const float* head_weights, const float* tile, float* products,
                  float* scores) const {
    Vec sums[kTileVecs] = {};
    for (int64_t head = 0; head < num_heads; head += Tiles::kRowBlock) {
      const int rows = int(std::min<int64_t>(Tiles::kRowBlock, num_heads - head));
      Tiles::score(rows, queries + head * num_words(), tile, num_words(), products);
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < kTileVecs; ++v) {
          const Vec product = max(load(products + row * kTileKeys + v * kLanes), Vec{});
          sums[v] = fma(product, broadcast(head_weights[head + row]), sums[v]);
        }
    }
    for (int v = 0; v < kTileVecs; ++v) store(scores + v * kLanes, sums[v]);
  }

  // Writes the slots of the `count` best positions, in the order of positions.
  void choose(const Token& token, const float* scores, int64_t count, int32_t* slots) const {
    if (token.num_seen <= count) {
      for (int64_t position = 0; position < token.num_seen; ++position) slots[position] = slot(token, position);
      std::fill(slots + token.num_seen, slots + count, 0);
      return;
    }
    static thread_local Scratch<uint64_t> scratch;
    uint64_t* ranks = scratch.get(token.num_seen);
    for (int64_t position = 0; position < token.num_seen; ++position)
      ranks[position] = rank(scores[position], position);
    std::nth_element(ranks, ranks + count - 1, ranks + token.num_seen, std::greater<uint64_t>());
    std::sort(ranks, ranks + count, [](uint64_t a, uint64_t b) { return uint32_t(a) > uint32_t(b); });
    for (int64_t i = 0; i < count; ++i) slots[i] = slot(token, ~uint32_t(ranks[i]));
  }

  // The better a score and the earlier its position, the larger; any number is, NaN included.
  static uint64_t rank(float score, int64_t position) {
    score += 0.0f;  // -0 is 0
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof(bits));
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t{bits} << 32 | uint32_t(~position);
  }
};

std::vector<Token> tokens_of(const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens) {
  const auto *tables = block_tables.const_data_ptr<int32_t>(), *starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const auto* lens = context_lens.const_data_ptr<int32_t>();
  std::vector<Token> tokens;
  for (int64_t i = 0; i < block_tables.size(0); ++i)
    for (int64_t seen = lens[i] - (starts[i + 1] - starts[i]) + 1; seen <= lens[i]; ++seen)
      tokens.push_back({tables + i * block_tables.size(1), seen});
  return tokens;
}

template <class Element>
void choose_all(const Index<Element>& index, const std::vector<Token>& tokens, int64_t count, int32_t* slots) {
  int64_t longest = 1;
  for (const Token& token : tokens) longest = std::max(longest, token.num_seen);
  const int64_t stride = round_up(longest, kTileKeys), parts = divide_up(longest, kPartKeys);
  const int64_t at_once = std::max<int64_t>(1, kScoresAtOnce / stride), num_tokens = tokens.size();
  const Tensor memory = new_empty({std::min(at_once, num_tokens) * stride}, kFloat);
  float* scores = memory.mutable_data_ptr<float>();
  for (int64_t first = 0; first < num_tokens; first += at_once) {
    const int64_t some = std::min(at_once, num_tokens - first);
    const bool serial = some * longest * index.num_heads * index.size < kSerialProducts;
    run_tasks(some * parts, serial, [&](int64_t task) {
      const int64_t number = first + task / parts, begin = task % parts * kPartKeys;
      const Token& token = tokens[number];
      const int64_t end = std::min(token.num_seen, begin + kPartKeys);
      if (begin < end && token.num_seen > count)
        index.score(token, number, begin, end, scores + task / parts * stride);
    });
    run_tasks(some, serial, [&](int64_t i) {
      index.choose(tokens[first + i], scores + i * stride, count, slots + (first + i) * count);
    });
  }
}

}  // namespace

Tensor choose_slots(const Tensor& query, const Tensor& weights, const Tensor& index_keys, const Tensor& block_tables,
                    const Tensor& cu_seqlens_q, const Tensor& context_lens, int64_t num_chosen) {
  TWOSTEP_CHECK(query.dim() == 3 && weights.dim() == 2 && index_keys.dim() == 3 && index_keys.is_contiguous() &&
                    query.size(2) == index_keys.size(2) && query.scalar_type() == index_keys.scalar_type(),
                "query is [tokens, index heads, size], index keys are [blocks, block size, size], of the same type");
  TWOSTEP_CHECK(weights.scalar_type() == kFloat && weights.sizes() == query.sizes().slice(0, 2),
                "weights are one float for each index head of each token");
  TWOSTEP_CHECK(num_chosen > 0, "num_chosen must be positive");
  const int64_t block_size = index_keys.size(1);
  check_metadata(block_tables, cu_seqlens_q, context_lens);
  check_numbers(block_tables, cu_seqlens_q, context_lens, query.size(0), index_keys.size(0), block_size);
  const auto tokens = tokens_of(block_tables, cu_seqlens_q, context_lens);
  const Tensor rows = query.contiguous(), factors = weights.contiguous();
  const Tensor slots = new_empty({query.size(0), num_chosen}, block_tables.scalar_type());
  const auto run = [&](auto element) {
    using Element = decltype(element);
    const Index<Element> index{rows.const_data_ptr<Element>(), factors.const_data_ptr<float>(),
                               index_keys.const_data_ptr<Element>(), query.size(1), query.size(2), block_size};
    choose_all(index, tokens, num_chosen, slots.mutable_data_ptr<int32_t>());
  };
  if (query.scalar_type() == kFloat) {
    run(float());
  } else {
    TWOSTEP_CHECK(query.scalar_type() == kBFloat16, "index keys are float32 or bfloat16");
    run(BFloat16());
  }
  return slots;
}

}  // namespace twostep
