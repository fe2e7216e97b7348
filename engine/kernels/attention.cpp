// Paged attention on CPUs: causal attention of query tokens over keys and values that lie in cache blocks.
//
// A query row's result is, bit for bit, a function of its query, its keys and values in position order and the
// parameters. It does not depend on the rest of the batch, on how many tokens of its sequence are computed at once, on
// block size or placement, or on threads. That holds because every sum has one order, which positions alone fix:
//
//   - Keys are cut into tiles of kTileKeys and splits of kSplitKeys positions, counted from position 0.
//   - A score sums over the head size in order. A row walks the tiles of a split in order with the online softmax
//     (Milakov and Gimelshein 2018; Dao et al., FlashAttention 2022), starting anew in each split.
//   - The splits of a row are merged in order, whether one thread did them all or each another (Flash-Decoding, 2023).
//   - Rows share the loading of a tile, never arithmetic: rows of every block size run the same instructions, with
//     explicit fused multiply-adds. Keys that a row may not see have weight 0, and adding 0 times a value changes no
//     sum (finish_row turns the one exception, a zero's sign, into +0), so tiles and tails of tiles can be left out.
//
// Block tables are those of PagedAttention (Kwon et al. 2023).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace {

using namespace twostep;

constexpr int kTileKeys = 64;
constexpr int kTileVecs = kTileKeys / kLanes;
constexpr int kSplitKeys = 512;
constexpr int kRowBlock = 6;        // rows whose accumulators stay in registers together
constexpr int kRowsPerTask = 64;    // query rows (tokens x heads of a group) that share each loaded tile
constexpr int kTasksPerThread = 4;  // with fewer, contexts are split among threads
constexpr int64_t kSerialWork = 1 << 15;  // multiply-adds below which waking the thread pool costs more than it saves
constexpr float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int kColumnVecs = 4;  // kRowBlock * kColumnVecs accumulators, of 32 registers
#else
constexpr int kColumnVecs = 1;
#endif

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// ---- How scores multiply and add ------------------------------------------------------------------------------------
//
// Queries and keys are packed into 32-bit words along the head size, padded with zeros to a multiple of four words.

// A word is one float.
template <class T>
struct FloatWords {
  using Element = T;
  static constexpr int kPack = 1;
  static Quad load_quad(const float* source) {
    Quad words;
    std::memcpy(&words, source, sizeof(words));
    return words;
  }
  static Quad load_quad(const at::BFloat16* source) {
    return Quad{float(source[0]), float(source[1]), float(source[2]), float(source[3])};
  }
  static Vec multiply_add(Vec sum, Vec keys, const float* query) { return fma(keys, broadcast(*query), sum); }
};

#if defined(__AVX512BF16__)
// A word is a pair of bfloat16; their products are exact in float32.
struct PairWords {
  using Element = at::BFloat16;
  static constexpr int kPack = 2;
  static Quad load_quad(const at::BFloat16* source) {
    Quad words;
    std::memcpy(&words, source, sizeof(words));
    return words;
  }
  static Vec multiply_add(Vec sum, Vec keys, const float* query) {
    const __m512 pair = (__m512)broadcast(*query).part[0];
    return Vec{{(PartF)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)(__m512)keys.part[0], (__m512bh)pair)}};
  }
};
#endif

// Words [0, num_words) of one head's vector, four at a time: f(word, Quad of words [word, word + 4)).
template <class Words, class F>
inline void each_quad(const typename Words::Element* source, int64_t head_size, F f) {
  constexpr int kElements = 4 * Words::kPack;
  int64_t begin = 0;
  for (; begin + kElements <= head_size; begin += kElements) f(begin / Words::kPack, Words::load_quad(source + begin));
  if (begin < head_size) {
    typename Words::Element padded[kElements] = {};
    std::memcpy(padded, source + begin, (head_size - begin) * sizeof(padded[0]));
    f(begin / Words::kPack, Words::load_quad(padded));
  }
}

// ---- Micro-kernels: ROWS query rows against one tile ----------------------------------------------------------------

// scores[row][key] = sum over words, in order; keys is [num_words][kTileKeys].
template <class Words, int ROWS>
void score_rows(const float* queries, const float* keys, int64_t num_words, float* scores) {
  for (int column = 0; column < kTileKeys; column += kColumnVecs * kLanes) {
    Vec sums[ROWS][kColumnVecs] = {};
    for (int64_t word = 0; word < num_words; ++word) {
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 8
        for (int v = 0; v < kColumnVecs; ++v) {
          const Vec key = load(keys + word * kTileKeys + column + v * kLanes);
          sums[row][v] = Words::multiply_add(sums[row][v], key, queries + row * num_words + word);
        }
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < kColumnVecs; ++v) store(scores + row * kTileKeys + column + v * kLanes, sums[row][v]);
  }
}

// out[row][columns] = out * factors[row] + sum over keys [begin, end), in order, of weights[row][key] * values[key].
template <int ROWS, int VECS>
void add_columns(const float* weights, const float* factors, const float* values, int begin, int end, int64_t stride,
                 float* out) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) sums[row][v] = load(out + row * stride + v * kLanes) * broadcast(factors[row]);
  for (int key = begin; key < end; ++key) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const Vec weight = broadcast(weights[row * kTileKeys + key]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v)
        sums[row][v] = fma(weight, load(values + key * stride + v * kLanes), sums[row][v]);
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int v = 0; v < VECS; ++v) store(out + row * stride + v * kLanes, sums[row][v]);
}

template <int ROWS>
void add_values(const float* weights, const float* factors, const float* values, int begin, int end, int64_t stride,
                float* out) {
  int64_t column = 0;
  for (; column + kColumnVecs * kLanes <= stride; column += kColumnVecs * kLanes)
    add_columns<ROWS, kColumnVecs>(weights, factors, values + column, begin, end, stride, out + column);
  for (; column < stride; column += kLanes)
    add_columns<ROWS, 1>(weights, factors, values + column, begin, end, stride, out + column);
}

// Calls f with the number of rows, 1 to kRowBlock, as a compile-time constant.
template <class F>
inline void with_constant_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, kRowBlock>{});
  }
}

// ---- One call's data ------------------------------------------------------------------------------------------------

template <class Element>
struct Problem {
  const Element* query;  // rows of head_size elements at query + token * query_token_stride + head * query_head_stride
  int64_t query_token_stride, query_head_stride;
  const Element *key_cache, *value_cache;  // [blocks, num_kv_heads, block_size, head_size or value_size]
  const int32_t* block_tables;             // [num_seqs, max_blocks]
  int64_t max_blocks;
  const float* sinks;  // [num_heads] or null
  Element* output;     // [num_tokens, num_heads, value_size]
  int64_t num_heads, num_kv_heads, group, block_size, head_size, value_size;
  float scaling, softcap;  // softcap 0: none
  int64_t window;          // positions a token sees, its own included; very large: all

  int64_t padded_value_size() const { return round_up(value_size, kLanes); }
  // The token at `position` sees the keys [first_visible(position), position + 1).
  int64_t first_visible(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }
};

// Some consecutive query tokens of one sequence, for one kv head. Row token * group + g is query head
// kv_head * group + g of token first_token + token, at position first_position + token.
struct Task {
  int64_t sequence, kv_head, first_token, num_tokens, first_position;
  int64_t first_split, end_split;  // the splits in which any of its rows sees a key
  float* partials = nullptr;       // one State per split, where several threads share the task

  int64_t last_position() const { return first_position + num_tokens - 1; }
  int64_t num_splits() const { return end_split - first_split; }
};

// Softmax in progress for each of a task's rows: sum of weight * value, largest score, sum of weights.
struct State {
  float *out, *maximum, *total;

  static int64_t num_floats(int64_t rows, int64_t stride) { return round_up(rows * (stride + 2), kLanes); }
  State(float* memory, int64_t rows, int64_t stride)
      : out(memory), maximum(memory + rows * stride), total(maximum + rows) {}
  void clear(int64_t rows, int64_t stride) {
    std::fill_n(out, rows * stride, 0.0f);
    std::fill_n(maximum, rows, -kInfinity);
    std::fill_n(total, rows, 0.0f);
  }
};

// Memory that a thread keeps from call to call; it only grows.
class Scratch {
 public:
  float* take(int64_t num_floats) {
    float* taken = memory_.get() + used_;
    used_ += round_up(num_floats, kLanes);
    return taken;
  }
  void reset(int64_t num_floats) {
    used_ = 0;
    if (num_floats <= size_) return;
    size_ = round_up(num_floats, kLanes);
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float))));
    TORCH_CHECK(memory_, "out of memory");
    std::fill_n(memory_.get(), size_, 0.0f);
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0, used_ = 0;
};

// ---- One thread's work ----------------------------------------------------------------------------------------------

template <class Words>
class Worker {
 public:
  using Element = typename Words::Element;

  Worker(const Problem<Element>& problem, int64_t max_rows)
      : p_(problem),
        num_words_(round_up((p_.head_size + Words::kPack - 1) / Words::kPack, 4)),
        stride_(p_.padded_value_size()),
        state_floats_(State::num_floats(max_rows, stride_)) {
    static thread_local Scratch scratch;
    scratch.reset(max_rows * (num_words_ + kLanes) + kTileKeys * (num_words_ + stride_) + 2 * state_floats_ +
                  kRowBlock * kTileKeys + 8 * kLanes);
    queries_ = scratch.take(max_rows * num_words_);
    lane_totals_ = scratch.take(max_rows * kLanes);
    keys_ = scratch.take(num_words_ * kTileKeys);
    values_ = scratch.take(kTileKeys * stride_);
    scores_ = scratch.take(kRowBlock * kTileKeys);
    part_memory_ = scratch.take(state_floats_);
    whole_memory_ = scratch.take(state_floats_);
  }

  // The whole of a task: every split, merged in order, and the output.
  void run(const Task& task) {
    const int64_t rows = task.num_tokens * p_.group;
    State part(part_memory_, rows, stride_), whole(whole_memory_, rows, stride_);
    load_queries(task);
    whole.clear(rows, stride_);
    for (int64_t split = task.first_split; split < task.end_split; ++split) {
      attend_split(task, split, part);
      merge(part, whole, rows);
    }
    finish(task, whole);
  }

  // One split of a task that several threads share; `finish_shared` merges them when all are done.
  void run_split(const Task& task, int64_t split) {
    load_queries(task);
    State part = shared_state(task, split);
    attend_split(task, split, part);
  }

  void finish_shared(const Task& task) {
    const int64_t rows = task.num_tokens * p_.group;
    State whole(whole_memory_, rows, stride_);
    whole.clear(rows, stride_);
    for (int64_t split = task.first_split; split < task.end_split; ++split) {
      merge(shared_state(task, split), whole, rows);
    }
    finish(task, whole);
  }

 private:
  State shared_state(const Task& task, int64_t split) const {
    const int64_t rows = task.num_tokens * p_.group;
    return State(task.partials + (split - task.first_split) * State::num_floats(rows, stride_), rows, stride_);
  }

  void load_queries(const Task& task) {
    for (int64_t row = 0; row < task.num_tokens * p_.group; ++row) {
      const int64_t token = task.first_token + row / p_.group, head = task.kv_head * p_.group + row % p_.group;
      each_quad<Words>(p_.query + token * p_.query_token_stride + head * p_.query_head_stride, p_.head_size,
                       [&](int64_t word, Quad q) { std::memcpy(queries_ + row * num_words_ + word, &q, sizeof(q)); });
    }
  }

  // Attention of the task's rows over positions [split * kSplitKeys, (split + 1) * kSplitKeys), into `part`.
  void attend_split(const Task& task, int64_t split, State& part) {
    const int64_t rows = task.num_tokens * p_.group;
    part.clear(rows, stride_);
    std::fill_n(lane_totals_, rows * kLanes, 0.0f);
    const int64_t begin = std::max(split * kSplitKeys, p_.first_visible(task.first_position) / kTileKeys * kTileKeys);
    const int64_t end = std::min((split + 1) * kSplitKeys, task.last_position() + 1);
    for (int64_t tile = begin; tile < end; tile += kTileKeys) attend_tile(task, tile, part);
    for (int64_t row = 0; row < rows; ++row) part.total[row] = fold_add(load(lane_totals_ + row * kLanes));
  }

  // Attention over positions [tile, tile + kTileKeys). Only tokens that see one of them take part: those at positions
  // >= tile whose window begins before the tile's end.
  void attend_tile(const Task& task, int64_t tile, State& part) {
    const int64_t first = std::max<int64_t>(0, tile - task.first_position);
    int64_t end = task.num_tokens;
    while (end > first && p_.first_visible(task.first_position + end - 1) >= tile + kTileKeys) --end;
    if (end <= first) return;
    load_tile(task, tile, std::min<int64_t>(kTileKeys, task.first_position + end - tile));
    const int64_t begin_row = first * p_.group, end_row = end * p_.group;
    const int64_t num_blocks = (end_row - begin_row + kRowBlock - 1) / kRowBlock;
    for (int64_t i = 0; i < num_blocks; ++i) {  // blocks of equal size, or one row less
      const int64_t row = begin_row + (end_row - begin_row) * i / num_blocks;
      const int64_t next = begin_row + (end_row - begin_row) * (i + 1) / num_blocks;
      with_constant_rows(int(next - row), [&](auto rows) { attend_rows<decltype(rows)::value>(task, tile, row, part); });
    }
  }

  // Copies keys and values of positions [tile, tile + num_keys) out of their blocks: keys transposed to words by keys,
  // values widened to float32. Columns of keys that are not there keep what they held; their scores are masked.
  void load_tile(const Task& task, int64_t tile, int64_t num_keys) {
    int64_t entries[kTileKeys];  // a key's number among the rows of the cache
    find_entries(task, tile, num_keys, entries);
    for (int key = 0; key < num_keys; key += kLanes) load_keys(entries + key, keys_ + key);
    const int64_t whole_size = p_.value_size / kLanes * kLanes;
    for (int64_t key = 0; key < num_keys; ++key) {
      const Element* source = p_.value_cache + entries[key] * p_.value_size;
      float* target = values_ + key * stride_;
      for (int64_t column = 0; column < whole_size; column += kLanes) store(target + column, load(source + column));
      if (whole_size < p_.value_size)
        store(target + whole_size, load_first(source + whole_size, p_.value_size - whole_size));
    }
  }

  void find_entries(const Task& task, int64_t tile, int64_t num_keys, int64_t* entries) const {
    const int32_t* table = p_.block_tables + task.sequence * p_.max_blocks;
    int64_t block = tile / p_.block_size, offset = tile % p_.block_size;
    for (int64_t key = 0; key < kTileKeys; ++key) {
      // Beyond the last key any entry will do that exists.
      entries[key] = key < num_keys ? (table[block] * p_.num_kv_heads + task.kv_head) * p_.block_size + offset : entries[0];
      if (++offset == p_.block_size) offset = 0, ++block;
    }
  }

  void load_keys(const int64_t* entries, float* target) {
    const auto quad_of = [&](int key, int64_t element) {
      return Words::load_quad(p_.key_cache + entries[key] * p_.head_size + element);
    };
    constexpr int kElements = 4 * Words::kPack;
    int64_t element = 0;
    for (; element + kElements <= p_.head_size; element += kElements) {
      Vec v[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
        v[r] = concatenate(quad_of(r, element), quad_of(4 + r, element), quad_of(8 + r, element), quad_of(12 + r, element));
      transpose_quarters(v);
      for (int r = 0; r < 4; ++r) store(target + (element / Words::kPack + r) * kTileKeys, v[r]);
    }
    if (element < p_.head_size) load_last_words(entries, element, target);
  }

  void load_last_words(const int64_t* entries, int64_t element, float* target) {
    for (int key = 0; key < kLanes; ++key) {
      Element padded[4 * Words::kPack] = {};
      std::memcpy(padded, p_.key_cache + entries[key] * p_.head_size + element,
                  (p_.head_size - element) * sizeof(Element));
      const Quad words = Words::load_quad(padded);
      for (int r = 0; r < 4; ++r) target[(element / Words::kPack + r) * kTileKeys + key] = words[r];
    }
  }

  template <int ROWS>
  void attend_rows(const Task& task, int64_t tile, int64_t first_row, State& part) {
    score_rows<Words, ROWS>(queries_ + first_row * num_words_, keys_, num_words_, scores_);
    float factors[ROWS];
    int begin = kTileKeys, end = 0;  // the keys that any of the rows sees
    for (int i = 0; i < ROWS; ++i) {
      const int64_t row = first_row + i, position = task.first_position + row / p_.group;
      const int first = int(std::max<int64_t>(0, p_.first_visible(position) - tile));
      const int last = int(std::min<int64_t>(kTileKeys, position + 1 - tile));
      factors[i] = weigh_row(scores_ + i * kTileKeys, first, last, part.maximum[row], lane_totals_ + row * kLanes);
      begin = std::min(begin, first);
      end = std::max(end, last);
    }
    add_values<ROWS>(scores_, factors, values_, begin, end, stride_, part.out + first_row * stride_);
  }

  // One step of the online softmax. Turns a row's scores, of which keys [begin, end) are visible, into weights
  // relative to the new maximum, and returns the factor for what was summed relative to the old one.
  float weigh_row(float* scores, int begin, int end, float& maximum, float* lane_totals) const {
    Vec x[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) x[v] = load(scores + v * kLanes) * broadcast(p_.scaling);
    if (p_.softcap > 0)
      for (Vec& score : x) score = broadcast(p_.softcap) * tanh(score / broadcast(p_.softcap));
    if (begin > 0 || end < kTileKeys) mask(x, begin, end);
    const float largest = fold_max(max(max(x[0], x[1]), max(x[2], x[3])));
    const float old = maximum;
    maximum = largest > old ? largest : old;
    const float factor = maximum == old ? 1.0f : exp_nonpositive(old - maximum);
    for (int v = 0; v < kTileVecs; ++v) {
      x[v] = exp_nonpositive(x[v] - broadcast(maximum));
      store(scores + v * kLanes, x[v]);
    }
    store(lane_totals, fma(load(lane_totals), broadcast(factor), (x[0] + x[1]) + (x[2] + x[3])));
    return factor;
  }

  static void mask(Vec (&x)[kTileVecs], int begin, int end) {
    const Vec hidden = broadcast(-kInfinity);
    for (int v = 0; v < kTileVecs; ++v) {
      const Vec key = lane_numbers() + broadcast(float(v * kLanes));
      x[v] = where_less(key, broadcast(float(end)), x[v], hidden);
      x[v] = where_less(key, broadcast(float(begin)), hidden, x[v]);
    }
  }

  // Joins the next split's softmax to that of the splits before it. A row that saw no key in the split stays as it is.
  void merge(const State& part, State& whole, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      if (part.maximum[row] == -kInfinity) continue;
      const float maximum = std::max(part.maximum[row], whole.maximum[row]);
      const Vec old_factor = exp_nonpositive(broadcast(whole.maximum[row] - maximum));
      const Vec new_factor = exp_nonpositive(broadcast(part.maximum[row] - maximum));
      const auto join = [&](Vec old, Vec added) { return fma(added, new_factor, old * old_factor); };
      whole.maximum[row] = maximum;
      whole.total[row] = join(broadcast(whole.total[row]), broadcast(part.total[row])).part[0][0];
      for (int64_t i = row * stride_; i < (row + 1) * stride_; i += kLanes)
        store(whole.out + i, join(load(whole.out + i), load(part.out + i)));
    }
  }

  void finish(const Task& task, const State& whole) const {
    for (int64_t row = 0; row < task.num_tokens * p_.group; ++row) {
      const int64_t token = task.first_token + row / p_.group, head = task.kv_head * p_.group + row % p_.group;
      const Vec norm = broadcast(normalizer(whole.maximum[row], whole.total[row], head));
      Element* target = p_.output + (token * p_.num_heads + head) * p_.value_size;
      for (int64_t column = 0; column < p_.value_size; column += kLanes) {
        alignas(64) float result[kLanes];
        store(result, fma(load(whole.out + row * stride_ + column), norm, Vec{}));  // + 0: no result is -0
        const int64_t count = std::min<int64_t>(kLanes, p_.value_size - column);
        for (int64_t i = 0; i < count; ++i) target[column + i] = static_cast<Element>(result[i]);
      }
    }
  }

  // 1 / (sum of all weights), the head's sink among them.
  float normalizer(float maximum, float total, int64_t head) const {
    if (!p_.sinks) return 1.0f / total;
    const float sink = p_.sinks[head], largest = std::max(maximum, sink);
    const float factor = exp_nonpositive(maximum - largest);
    return factor / (total * factor + exp_nonpositive(sink - largest));
  }

  const Problem<Element>& p_;
  const int64_t num_words_, stride_, state_floats_;
  float *queries_, *keys_, *values_;            // [max_rows, num_words_], [num_words_, kTileKeys], [kTileKeys, stride_]
  float *scores_, *lane_totals_;                // [kRowBlock, kTileKeys], [max_rows, kLanes]
  float *part_memory_, *whole_memory_;          // a State each
};

// ---- Sharing the work among threads ---------------------------------------------------------------------------------

// Runs f(worker, i) for i in [0, count), each thread taking the next i when it is free.
template <class Words, class F>
void share(const Problem<typename Words::Element>& problem, int64_t max_rows, int64_t count, int64_t threads, F f) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(count, threads), 1, [&](int64_t, int64_t) {
    Worker<Words> worker(problem, max_rows);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(worker, i);
  });
}

template <class Element>
std::vector<Task> make_tasks(const Problem<Element>& p, const at::Tensor& cu_seqlens_q, const at::Tensor& context_lens) {
  const int64_t tokens_per_task = std::max<int64_t>(1, kRowsPerTask / p.group);
  const int32_t *starts = cu_seqlens_q.const_data_ptr<int32_t>(), *lengths = context_lens.const_data_ptr<int32_t>();
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < context_lens.numel(); ++sequence) {
    // The sequence's tokens are [starts[sequence], starts[sequence + 1]); token t has position t + to_position.
    const int64_t end = starts[sequence + 1], to_position = lengths[sequence] - end;
    for (int64_t token = starts[sequence]; token < end; token += tokens_per_task) {
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        Task task{sequence, kv_head, token, std::min(tokens_per_task, end - token), token + to_position, 0, 0};
        task.first_split = p.first_visible(task.first_position) / kSplitKeys;
        task.end_split = task.last_position() / kSplitKeys + 1;
        tasks.push_back(task);
      }
    }
  }
  // Longest first, so that threads finish together.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.num_splits() > b.num_splits(); });
  return tasks;
}

// Few tasks for many threads: the unit of work is one split of one task, and merging comes after.
template <class Words>
void run_splits(const Problem<typename Words::Element>& p, std::vector<Task>& tasks, int64_t max_rows, int64_t threads) {
  std::vector<std::pair<const Task*, int64_t>> units;
  int64_t num_floats = 0;
  for (const Task& task : tasks) {
    for (int64_t split = task.first_split; split < task.end_split; ++split) units.emplace_back(&task, split);
    num_floats += task.num_splits() * State::num_floats(task.num_tokens * p.group, p.padded_value_size());
  }
  const at::Tensor memory = at::empty({num_floats}, at::kFloat);
  float* partials = memory.mutable_data_ptr<float>();
  for (Task& task : tasks) {
    task.partials = partials;
    partials += task.num_splits() * State::num_floats(task.num_tokens * p.group, p.padded_value_size());
  }
  share<Words>(p, max_rows, units.size(), threads,
               [&](Worker<Words>& worker, int64_t i) { worker.run_split(*units[i].first, units[i].second); });
  share<Words>(p, max_rows, tasks.size(), threads,
               [&](Worker<Words>& worker, int64_t i) { worker.finish_shared(tasks[i]); });
}

template <class Words>
void run_all(const Problem<typename Words::Element>& p, std::vector<Task>& tasks) {
  int64_t max_rows = 0, work = 0, num_splits = 0;
  for (const Task& task : tasks) {
    const int64_t rows = task.num_tokens * p.group;
    max_rows = std::max(max_rows, rows);
    num_splits += task.num_splits();
    work += rows * std::min(task.last_position() + 1, p.window) * (p.head_size + p.value_size);
  }
  const int64_t threads = work < kSerialWork ? 1 : at::get_num_threads();
  const int64_t num_tasks = tasks.size();
  if (threads > 1 && num_tasks < threads * kTasksPerThread && num_splits > num_tasks) {
    run_splits<Words>(p, tasks, max_rows, threads);
  } else {
    share<Words>(p, max_rows, num_tasks, threads, [&](Worker<Words>& worker, int64_t i) { worker.run(tasks[i]); });
  }
}

void run_problem(const Problem<float>& p, std::vector<Task>& tasks) { run_all<FloatWords<float>>(p, tasks); }

void run_problem(const Problem<at::BFloat16>& p, std::vector<Task>& tasks) {
#if defined(__AVX512BF16__)
  run_all<PairWords>(p, tasks);
#else
  run_all<FloatWords<at::BFloat16>>(p, tasks);
#endif
}

// ---- The ops --------------------------------------------------------------------------------------------------------

void check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "caches are [blocks, kv heads, block size, head size]");
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous(), "caches must be contiguous");
  TORCH_CHECK(key_cache.sizes().slice(0, 3) == value_cache.sizes().slice(0, 3), "key and value cache differ in shape");
  TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "key and value cache differ in type");
}

void check_metadata(const at::Tensor& block_tables, const at::Tensor& cu_seqlens_q, const at::Tensor& context_lens) {
  for (const at::Tensor* tensor : {&block_tables, &cu_seqlens_q, &context_lens})
    TORCH_CHECK(tensor->scalar_type() == at::kInt && tensor->is_contiguous(), "metadata must be contiguous int32");
  TORCH_CHECK(block_tables.dim() == 2 && block_tables.size(0) == context_lens.numel() &&
                  cu_seqlens_q.numel() == context_lens.numel() + 1,
              "metadata differ in their number of sequences");
}

template <class Element>
void attend(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
            const at::Tensor& block_tables, const at::Tensor& cu_seqlens_q, const at::Tensor& context_lens,
            double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap, const float* sinks,
            const at::Tensor& output) {
  Problem<Element> p;
  p.query = query.const_data_ptr<Element>();
  p.query_token_stride = query.stride(0), p.query_head_stride = query.stride(1);
  p.key_cache = key_cache.const_data_ptr<Element>(), p.value_cache = value_cache.const_data_ptr<Element>();
  p.block_tables = block_tables.const_data_ptr<int32_t>(), p.max_blocks = block_tables.size(1);
  p.sinks = sinks;
  p.output = output.mutable_data_ptr<Element>();
  p.num_heads = query.size(1), p.num_kv_heads = key_cache.size(1), p.group = p.num_heads / p.num_kv_heads;
  p.block_size = key_cache.size(2), p.head_size = key_cache.size(3), p.value_size = value_cache.size(3);
  p.scaling = float(scaling), p.softcap = float(softcap.value_or(0.0));
  p.window = sliding_window.value_or(int64_t(1) << 40);
  std::vector<Task> tasks = make_tasks(p, cu_seqlens_q, context_lens);
  run_problem(p, tasks);
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& cu_seqlens_q,
                           const at::Tensor& context_lens, double scaling, std::optional<int64_t> sliding_window,
                           std::optional<double> softcap, const std::optional<at::Tensor>& sinks) {
  check_caches(key_cache, value_cache);
  check_metadata(block_tables, cu_seqlens_q, context_lens);
  TORCH_CHECK(query.dim() == 3 && query.size(2) == key_cache.size(3), "query is [tokens, heads, head size]");
  TORCH_CHECK(query.size(1) % key_cache.size(1) == 0, "query heads must be a multiple of kv heads");
  TORCH_CHECK(query.scalar_type() == key_cache.scalar_type(), "query and caches differ in type");
  TORCH_CHECK(!sliding_window || *sliding_window > 0, "sliding_window must be positive");
  const at::Tensor rows = query.stride(2) == 1 ? query : query.contiguous();
  const at::Tensor logits = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  TORCH_CHECK(!sinks || logits.numel() == query.size(1), "sinks is [heads]");
  const at::Tensor output = at::empty({query.size(0), query.size(1), value_cache.size(3)}, query.options());
  const auto run = [&](auto element) {
    attend<decltype(element)>(rows, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens, scaling,
                              sliding_window, softcap, sinks ? logits.const_data_ptr<float>() : nullptr, output);
  };
  if (query.scalar_type() == at::kFloat) {
    run(float{});
  } else {
    TORCH_CHECK(query.scalar_type() == at::kBFloat16, "paged_attention takes float32 or bfloat16");
    run(at::BFloat16{});
  }
  return output;
}

// Copies each token's heads into slot slots[token] of the cache: block slot / block_size, offset slot % block_size.
void write_cache(const at::Tensor& rows, const at::Tensor& cache, const int64_t* slots) {
  TORCH_CHECK(rows.dim() == 3 && rows.size(1) == cache.size(1) && rows.size(2) == cache.size(3),
              "keys and values are [tokens, kv heads, head size]");
  TORCH_CHECK(rows.scalar_type() == cache.scalar_type(), "keys or values differ from the cache in type");
  const at::Tensor source = rows.stride(2) == 1 || rows.size(2) == 1 ? rows : rows.contiguous();
  const int64_t num_heads = cache.size(1), block_size = cache.size(2), size = cache.size(3);
  const int64_t bytes = cache.element_size(), token_stride = source.stride(0), head_stride = source.stride(1);
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kSerialWork / std::max<int64_t>(1, num_heads * size));
  at::parallel_for(0, source.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
      for (int64_t head = 0; head < num_heads; ++head)
        std::memcpy(to + ((block * num_heads + head) * block_size + offset) * size * bytes,
                    from + (token * token_stride + head * head_stride) * bytes, size * bytes);
    }
  });
}

void write_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping) {
  check_caches(key_cache, value_cache);
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous() &&
                  slot_mapping.numel() == key.size(0) && slot_mapping.numel() == value.size(0),
              "slot_mapping is one int64 per token");
  write_cache(key, key_cache, slot_mapping.const_data_ptr<int64_t>());
  write_cache(value, value_cache, slot_mapping.const_data_ptr<int64_t>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor cu_seqlens_q, "
      "Tensor context_lens, float scaling, int? sliding_window, float? softcap, Tensor? sinks) -> Tensor");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()");
}

TORCH_LIBRARY_IMPL(twostep, CPU, library) {
  library.impl("paged_attention", &paged_attention);
  library.impl("write_kv", &write_kv);
}
