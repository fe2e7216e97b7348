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
//   - Rows share the loading of a tile, never arithmetic: blocks of however many rows run the same instructions, with
//     explicit fused multiply-adds. Keys that a row may not see have weight 0, and adding 0 times a (finite) value
//     changes no sum (`finish` turns the one exception, a zero's sign, into +0), so such keys can also be left out.
//
// Block tables are those of PagedAttention (Kwon et al. 2023).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "attention_amx.h"
#include "attention_vector.h"
#include "operators.h"
#include "threads.h"

namespace {

using namespace twostep;
using namespace twostep::attention;

constexpr int kSplitKeys = 512;
constexpr int kTasksPerThread = 4;                        // with fewer, contexts are split among threads
constexpr int kPrefetchPerCopy = 3, kPrefetchPerRow = 6;  // keys: spreads a tile of them over the work on the last
constexpr int64_t kSerialWork = 1 << 18;                  // multiply-adds below which a second thread does not pay
constexpr int64_t kSerialCopy = 1 << 15;                  // elements, likewise
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- One call's data ------------------------------------------------------------------------------------------------

template <class Element>
struct Problem {
  const Element* query;  // rows of head_size elements at query + token * query_token_stride + head * query_head_stride
  int64_t query_token_stride, query_head_stride;
  const Element *key_cache, *value_cache;  // [blocks, num_kv_heads, block_size, head_size or value_size]
  const int32_t *block_tables, *cu_seqlens_q, *context_lens;  // as in AttentionMetadata
  int64_t num_seqs, max_blocks;
  const float* sinks;  // [num_heads] or null
  Element* output;     // [num_tokens, num_heads, value_size]
  int64_t num_heads, num_kv_heads, group, block_size, head_size, value_size;
  float scaling, softcap;  // softcap 0: none
  float exponent;          // a score's weight is 2 ** (exponent * score), up to the factor that all of a row share
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

// Decode waits for memory: a tile's arithmetic takes 0.8 us, its 16 KB, from eight places, 2.4 us, where a thread that
// does nothing but read pieces of 2 KB gets them in 2.0. On Zen 5 it is 1.1, 1.7 and 1.2 us. Tried without gain: keys and
// values of all heads side by side in a block, all kv heads of a token in one task, blocks of 32 or 64 tokens, asking for
// every second line, for keys and values sixteen by turns, into the L1 cache, and for the next task's first tile; and
// values that are added up from where they lie, which takes a third less arithmetic where caches hold them all.

template <class Tiles>
class Worker {
 public:
  using Words = typename Tiles::Words;
  using Element = typename Tiles::Element;

  Worker(const Problem<Element>& problem, int64_t max_rows)
      : p_(problem),
        num_words_(Tiles::query_words(p_.head_size)),
        stride_(p_.padded_value_size()),
        state_floats_(State::num_floats(max_rows, stride_)) {
    static thread_local Scratch scratch;
    const int64_t query_words = max_rows * num_words_, key_words = num_words_ * kTileKeys;
    const int64_t value_words = Tiles::value_words(stride_), num_scores = Tiles::kRowBlock * kTileKeys;
    scratch.reset(query_words + key_words + value_words + num_scores + max_rows * kLanes + 2 * state_floats_);
    queries_ = scratch.take(query_words);
    keys_ = scratch.take(key_words);
    values_ = scratch.take(value_words);
    scores_ = scratch.take(num_scores);
    lane_totals_ = scratch.take(max_rows * kLanes);
    part_memory_ = scratch.take(state_floats_);
    whole_memory_ = scratch.take(state_floats_);
    std::fill_n(queries_, query_words, 0.0f);  // the padding of words stays zero, for all tasks
    std::fill_n(keys_, key_words, 0.0f);
  }

  // The whole of a task: every split, merged in order, and the output.
  void run(const Task& task) {
    const int64_t rows = task.num_tokens * p_.group;
    State part(part_memory_, rows, stride_), whole(whole_memory_, rows, stride_);
    load_queries(task);
    attend_split(task, task.first_split, whole);
    for (int64_t split = task.first_split + 1; split < task.end_split; ++split) {
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
    State whole = shared_state(task, task.first_split);
    for (int64_t split = task.first_split + 1; split < task.end_split; ++split) {
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
      const Element* source = p_.query + token * p_.query_token_stride + head * p_.query_head_stride;
      Words::load_query(source, p_.head_size, queries_ + row * num_words_);
    }
  }

  // Attention of the task's rows over positions [split * kSplitKeys, (split + 1) * kSplitKeys), into `part`.
  void attend_split(const Task& task, int64_t split, State& part) {
    const int64_t rows = task.num_tokens * p_.group;
    part.clear(rows, stride_);
    std::fill_n(lane_totals_, rows * kLanes, 0.0f);
    const int64_t begin = std::max(split * kSplitKeys, p_.first_visible(task.first_position) / kTileKeys * kTileKeys);
    const int64_t end = std::min((split + 1) * kSplitKeys, task.last_position() + 1);
    find_entries(task, begin);
    for (int64_t tile = begin; tile < end; tile += kTileKeys) attend_tile(task, tile, part);
    for (int64_t row = 0; row < rows; ++row) part.total[row] = fold_add(load(lane_totals_ + row * kLanes));
  }

  // Attention over positions [tile, tile + kTileKeys). Only tokens that see one of them take part: those at positions
  // >= tile whose window begins before the tile's end.
  void attend_tile(const Task& task, int64_t tile, State& part) {
    const int64_t first = std::max<int64_t>(0, tile - task.first_position);
    int64_t end = task.num_tokens;
    while (p_.first_visible(task.first_position + end - 1) >= tile + kTileKeys) --end;
    load_tile(task, tile, std::min<int64_t>(kTileKeys, task.first_position + end - tile));
    const int64_t begin_row = first * p_.group, end_row = end * p_.group;
    const int64_t num_blocks = (end_row - begin_row + Tiles::kRowBlock - 1) / Tiles::kRowBlock;
    const int64_t size = (end_row - begin_row + num_blocks - 1) / num_blocks;  // about the same for all blocks
    for (int64_t row = begin_row; row < end_row; row += size)
      attend_rows(task, tile, row, int(std::min(size, end_row - row)), part);
  }

  // Copies the tile's first `num_keys` keys and values out of their blocks, packed as Tiles wants them. Columns of keys
  // that are not there keep what they held; their scores are masked. Between copies asks memory for the tile to come.
  void load_tile(const Task& task, int64_t tile, int64_t num_keys) {
    int64_t entries[kTileKeys];
    std::copy_n(entries_, kTileKeys, entries);
    const bool is_last = tile + kTileKeys > task.last_position();
    if (!is_last) find_entries(task, tile + kTileKeys);
    prefetched_ = is_last ? kTileKeys : 0;
    for (int key = 0; key < kTileKeys; key += kLanes) {
      if (key < num_keys) load_sixteen_keys<Words>(p_.key_cache, p_.head_size, entries + key, keys_ + key);
      prefetch_keys(kPrefetchPerCopy);
      Tiles::load_values(p_.value_cache, p_.value_size, entries, key, num_keys, stride_, values_);
      prefetch_keys(kPrefetchPerCopy);
    }
  }

  void prefetch_keys(int64_t count) {
    for (const int64_t end = std::min<int64_t>(kTileKeys, prefetched_ + count); prefetched_ < end; ++prefetched_) {
      prefetch(p_.key_cache + entries_[prefetched_] * p_.head_size, p_.head_size);
      prefetch(p_.value_cache + entries_[prefetched_] * p_.value_size, p_.value_size);
    }
  }

  static void prefetch(const Element* first, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(Element)) __builtin_prefetch(first + i, 0, 2);
  }

  // Where the keys of positions [tile, tile + kTileKeys) lie. Beyond the task's last any entry will do that exists.
  void find_entries(const Task& task, int64_t tile) {
    const int32_t* table = p_.block_tables + task.sequence * p_.max_blocks;
    const int64_t num_keys = std::min<int64_t>(kTileKeys, task.last_position() + 1 - tile);
    int64_t block = tile / p_.block_size, offset = tile % p_.block_size;
    for (int64_t key = 0; key < num_keys; offset = 0, ++block) {
      const int64_t first = (table[block] * p_.num_kv_heads + task.kv_head) * p_.block_size + offset;
      const int64_t count = std::min(p_.block_size - offset, num_keys - key);
      for (int64_t i = 0; i < count; ++i) entries_[key + i] = first + i;
      key += count;
    }
    std::fill(entries_ + num_keys, entries_ + kTileKeys, entries_[0]);
  }

  // One step of the online softmax for some rows: their scores, then weights relative to the largest scores so far, then
  // the sums, to which `factors` bring what was summed relative to the old ones. All rows do each of these before any
  // does the next, without branches: a row has a new largest score in every third tile, which no CPU foresees.
  void attend_rows(const Task& task, int64_t tile, int64_t first_row, int rows, State& part) {
    tiles_.score(rows, queries_ + first_row * num_words_, keys_, num_words_, scores_);
    alignas(64) float largest[kLanes], drops[kLanes] = {}, factors[kLanes];
    int begin = kTileKeys, end = 0;  // the keys that any of the rows sees
    int64_t position = task.first_position + first_row / p_.group, head = first_row % p_.group;
    for (int i = 0; i < rows; ++i) {
      const int first = int(std::max<int64_t>(0, p_.first_visible(position) - tile));
      const int last = int(std::min<int64_t>(kTileKeys, position + 1 - tile));
      largest[i] = largest_score(scores_ + i * kTileKeys, first, last);
      begin = std::min(begin, first);
      end = std::max(end, last);
      if (++head == p_.group) head = 0, ++position;
    }
    float* maxima = part.maximum + first_row;
    for (int i = 0; i < rows; ++i) {
      const float old = maxima[i];
      maxima[i] = largest[i] > old ? largest[i] : old;
      drops[i] = old - maxima[i];
    }
    store(factors, exp2_of_product(load(drops), broadcast(p_.exponent)));
    for (int i = 0; i < rows; ++i) {
      prefetch_keys(kPrefetchPerRow);
      float* lane_totals = lane_totals_ + (first_row + i) * kLanes;
      store(lane_totals, fma(load(lane_totals), broadcast(factors[i]), weigh_row(i, maxima[i])));
    }
    tiles_.add(rows, scores_, factors, values_, begin, end, stride_, part.out + first_row * stride_);
  }

  // The largest of a row's scores for the keys [begin, end), which it sees. Hides the others.
  float largest_score(float* scores, int begin, int end) const {
    Vec x[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) x[v] = load(scores + v * kLanes);
    const bool has_softcap = p_.softcap > 0, is_masked = begin > 0 || end < kTileKeys;
    if (has_softcap)
      for (Vec& score : x) score = broadcast(p_.softcap) * tanh(score * broadcast(p_.scaling) / broadcast(p_.softcap));
    if (is_masked) mask(x, begin, end);
    if (has_softcap || is_masked)
      for (int v = 0; v < kTileVecs; ++v) store(scores + v * kLanes, x[v]);
    return fold_max(max(max(x[0], x[1]), max(x[2], x[3])));
  }

  // Turns the scores of a row of the block into weights relative to `maximum`, and returns their sum in each lane.
  Vec weigh_row(int row, float maximum) {
    Vec x[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) {
      const Vec score = load(scores_ + row * kTileKeys + v * kLanes);
      x[v] = exp2_of_product(score - broadcast(maximum), broadcast(p_.exponent));
    }
    tiles_.put_weights(row, x, scores_);
    return (x[0] + x[1]) + (x[2] + x[3]);
  }

  static void mask(Vec (&x)[kTileVecs], int begin, int end) {
    const Vec hidden = broadcast(-kInfinity);
    for (int v = 0; v < kTileVecs; ++v) {
      const Vec key = lane_numbers() + broadcast(float(v * kLanes));
      x[v] = where_less(key, broadcast(float(end)), x[v], hidden);
      x[v] = where_less(key, broadcast(float(begin)), hidden, x[v]);
    }
  }

  // Joins the next split's softmax to that of the splits before it. A row that saw no key in the split (else its total
  // is at least 1, the weight of its largest score, or NaN) stays as it is.
  void merge(const State& part, State& whole, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      if (part.total[row] == 0.0f) continue;
      const float maximum = std::max(part.maximum[row], whole.maximum[row]);
      const Vec exponent = broadcast(p_.exponent);
      const Vec old_factor = exp2_of_product(broadcast(whole.maximum[row] - maximum), exponent);
      const Vec new_factor = exp2_of_product(broadcast(part.maximum[row] - maximum), exponent);
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
        const Vec result = fma(load(whole.out + row * stride_ + column), norm, Vec{});  // + 0: no result is -0
        const int64_t count = p_.value_size - column;
        count < kLanes ? store_first(target + column, count, result) : store(target + column, result);
      }
    }
  }

  // 1 / (sum of all weights), the head's sink among them.
  float normalizer(float maximum, float total, int64_t head) const {
    if (!p_.sinks) return 1.0f / total;
    const float score = p_.softcap > 0 ? maximum : maximum * p_.scaling;
    const float sink = p_.sinks[head], largest = std::max(score, sink), factor = exp_nonpositive(score - largest);
    return factor / (total * factor + exp_nonpositive(sink - largest));
  }

  const Problem<Element>& p_;
  Tiles tiles_;
  const int64_t num_words_, stride_, state_floats_;
  int64_t prefetched_ = 0;              // keys of that tile that memory was asked for
  int64_t entries_[kTileKeys];          // of the tile to load next: its keys' numbers among the rows of the cache
  float *queries_, *keys_, *values_;    // [max_rows, num_words_], [num_words_, kTileKeys], as Tiles has it
  float *scores_, *lane_totals_;        // [Tiles::kRowBlock, kTileKeys], [max_rows, kLanes]
  float *part_memory_, *whole_memory_;  // a State each
};

// ---- Sharing the work among threads ---------------------------------------------------------------------------------

// Runs f(worker, i) for i in [0, count), each thread taking the next i when it is free.
template <class Tiles, class F>
void share(const Problem<typename Tiles::Element>& problem, int64_t max_rows, int64_t count, int64_t threads, F f) {
  std::atomic<int64_t> next{0};
  twostep::Threads::of_process().run(std::min(count, threads), [&](int64_t) {
    Worker<Tiles> worker(problem, max_rows);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(worker, i);
  });
}

template <class Element>
std::vector<Task> make_tasks(const Problem<Element>& p, int64_t rows_per_task) {
  int64_t tokens_per_task = std::max<int64_t>(1, rows_per_task / p.group);
  if (tokens_per_task > 16) tokens_per_task = tokens_per_task / 16 * 16;  // whole blocks of rows for any group
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < p.num_seqs; ++sequence) {
    // The sequence's tokens are [cu_seqlens_q[sequence], end); token t has position t + to_position.
    const int64_t end = p.cu_seqlens_q[sequence + 1], to_position = p.context_lens[sequence] - end;
    for (int64_t token = p.cu_seqlens_q[sequence]; token < end; token += tokens_per_task) {
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        Task task{sequence, kv_head, token, std::min(tokens_per_task, end - token), token + to_position, 0, 0};
        task.first_split = p.first_visible(task.first_position) / kSplitKeys;
        task.end_split = task.last_position() / kSplitKeys + 1;
        tasks.push_back(task);
      }
    }
  }
  // Longest first, so that threads finish together.
  const auto length = [&](const Task& task) { return task.last_position() - p.first_visible(task.first_position); };
  const auto longer = [&](const Task& a, const Task& b) { return length(a) > length(b); };
  std::stable_sort(tasks.begin(), tasks.end(), longer);
  return tasks;
}

// Few tasks for many threads: the unit of work is one split of one task, and merging comes after.
template <class Tiles>
void run_splits(const Problem<typename Tiles::Element>& p, std::vector<Task>& tasks, int64_t max_rows,
                int64_t threads) {
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
  share<Tiles>(p, max_rows, units.size(), threads,
               [&](Worker<Tiles>& worker, int64_t i) { worker.run_split(*units[i].first, units[i].second); });
  share<Tiles>(p, max_rows, tasks.size(), threads,
               [&](Worker<Tiles>& worker, int64_t i) { worker.finish_shared(tasks[i]); });
}

template <class Tiles>
void run_all(const Problem<typename Tiles::Element>& p) {
  std::vector<Task> tasks = make_tasks(p, Tiles::kRowsPerTask);
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
    run_splits<Tiles>(p, tasks, max_rows, threads);
  } else {
    share<Tiles>(p, max_rows, num_tasks, threads, [&](Worker<Tiles>& worker, int64_t i) { worker.run(tasks[i]); });
  }
}

void run_problem(const Problem<float>& p) { run_all<VectorTiles<FloatWords>>(p); }

void run_problem(const Problem<at::BFloat16>& p) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return run_all<AmxTiles>(p);
  run_all<VectorTiles<WidenedWords>>(p);  // Intel multiplies pairs at half the speed of float32
#elif defined(__AVX512BF16__)
  run_all<VectorTiles<PairWords>>(p);
#else
  run_all<VectorTiles<WidenedWords>>(p);
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
  p.block_tables = block_tables.const_data_ptr<int32_t>();
  p.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int32_t>(), p.context_lens = context_lens.const_data_ptr<int32_t>();
  p.num_seqs = block_tables.size(0), p.max_blocks = block_tables.size(1);
  p.sinks = sinks;
  p.output = output.mutable_data_ptr<Element>();
  p.num_heads = query.size(1), p.num_kv_heads = key_cache.size(1), p.group = p.num_heads / p.num_kv_heads;
  p.block_size = key_cache.size(2), p.head_size = key_cache.size(3), p.value_size = value_cache.size(3);
  p.scaling = float(scaling), p.softcap = float(softcap.value_or(0.0));
  p.exponent = 1.44269504f * (p.softcap > 0 ? 1.0f : p.scaling);  // log2(e): e ** x = 2 ** (x * log2(e))
  p.window = sliding_window.value_or(int64_t(1) << 40);
  run_problem(p);
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
  const int64_t grain = std::max<int64_t>(1, kSerialCopy / std::max<int64_t>(1, num_heads * size));
  twostep::run_ranges(source.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
      for (int64_t head = 0; head < num_heads; ++head)
        std::memcpy(to + ((block * num_heads + head) * block_size + offset) * size * bytes,
                    from + (token * token_stride + head * head_stride) * bytes, size * bytes);
    }
  });
}

}  // namespace

namespace twostep {

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& cu_seqlens_q,
                           const at::Tensor& context_lens, double scaling, std::optional<int64_t> sliding_window,
                           std::optional<double> softcap, const std::optional<at::Tensor>& sinks) {
  check_caches(key_cache, value_cache);
  check_metadata(block_tables, cu_seqlens_q, context_lens);
  TORCH_CHECK(query.dim() == 3 && query.size(2) == key_cache.size(3), "query is [tokens, heads, head size]");
  TORCH_CHECK(query.size(1) % key_cache.size(1) == 0, "query heads must be a multiple of kv heads");
  TORCH_CHECK(query.scalar_type() == key_cache.scalar_type(), "query and caches differ in type");
  TORCH_CHECK(scaling > 0, "scaling must be positive");
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

void write_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping) {
  check_caches(key_cache, value_cache);
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous() &&
                  slot_mapping.numel() == key.size(0) && slot_mapping.numel() == value.size(0),
              "slot_mapping is one int64 per token");
  write_cache(key, key_cache, slot_mapping.const_data_ptr<int64_t>());
  write_cache(value, value_cache, slot_mapping.const_data_ptr<int64_t>());
}

}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor cu_seqlens_q, "
      "Tensor context_lens, float scaling, int? sliding_window, float? softcap, Tensor? sinks) -> Tensor");
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()");
}

TORCH_LIBRARY_IMPL(twostep, CPU, library) {
  library.impl("paged_attention", &twostep::paged_attention);
  library.impl("write_kv", &twostep::write_kv);
}
