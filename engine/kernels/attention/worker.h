// Paged attention of one thread: a task, or one split of it. attention.cpp defines the order of all sums.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/problem.h"
#include "attention/vector.h"
#include "base/scratch.h"
#include "base/thread_pool.h"

namespace twostep::attention {

// Decode waits for memory: with AMX a tile's arithmetic takes 0.8 us, its 16 KB, from eight places, 2.4 us, where a
// thread that does nothing but read pieces of 2 KB gets them in 2.0. Tried without gain: keys and values of all heads
// side by side in a block, all kv heads of a token in one task, blocks of 32 or 64 tokens, prefetching every second
// line only, and into the L1 cache.

template <class Tiles>
using ProblemOf = Problem<typename Tiles::Element, typename Tiles::Format>;

template <class Tiles>
class Worker {
 public:
  using Words = typename Tiles::Words;
  using Element = typename Tiles::Element;
  using Stored = typename Tiles::Format::Stored;

  Worker(const ProblemOf<Tiles>& problem, int64_t max_rows)
      : p_(problem),
        num_words_(Tiles::query_words(p_.head_size)),
        stride_(p_.padded_value_size()),
        state_floats_(State::num_floats(max_rows, stride_)) {
    const int64_t query_words = round_up(max_rows * num_words_, kLanes), key_words = num_words_ * kTileKeys;
    const int64_t value_words = Tiles::value_words(stride_), num_scores = Tiles::kRowBlock * kTileKeys;
    static thread_local Scratch<float> scratch;
    queries_ = scratch.get(query_words + key_words + value_words + num_scores + max_rows * kLanes + 2 * state_floats_);
    keys_ = queries_ + query_words;
    values_ = keys_ + key_words;
    scores_ = values_ + value_words;
    lane_totals_ = scores_ + num_scores;
    part_memory_ = lane_totals_ + max_rows * kLanes;
    whole_memory_ = part_memory_ + state_floats_;
    std::fill_n(queries_, query_words, 0.0f);  // the padding of words stays zero, for all tasks
    std::fill_n(keys_, key_words, 0.0f);
  }

  // Runs a whole task: every split, merged in order, and the output. `then`, if any, is the task that it runs next.
  void run(const Task& task, const Task* then) {
    then_ = then;
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

  // Runs one split of a task that several threads share; `finish_shared` merges them when all are done.
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

  // Computes attention of the task's rows over positions [split * kSplitKeys, (split + 1) * kSplitKeys), into `part`.
  void attend_split(const Task& task, int64_t split, State& part) {
    const int64_t rows = task.num_tokens * p_.group;
    part.clear(rows, stride_);
    std::fill_n(lane_totals_, rows * kLanes, 0.0f);
    const int64_t begin = first_tile(task, split);
    const int64_t end = std::min((split + 1) * kSplitKeys, task.last_position() + 1);
    find_entries(task, begin);
    for (int64_t tile = begin; tile < end; tile += kTileKeys) attend_tile(task, tile, part);
    for (int64_t row = 0; row < rows; ++row) part.total[row] = fold_add(load(lane_totals_ + row * kLanes));
  }

  // Returns the position at which the first tile of a task's split begins.
  int64_t first_tile(const Task& task, int64_t split) const {
    return std::max(split * kSplitKeys, p_.first_visible(task.first_position) / kTileKeys * kTileKeys);
  }

  // Computes attention over positions [tile, tile + kTileKeys), for the tokens that see one of them: those at positions
  // >= tile whose window begins before the tile's end.
  void attend_tile(const Task& task, int64_t tile, State& part) {
    const int64_t first = std::max<int64_t>(0, tile - task.first_position);
    int64_t end = task.num_tokens;
    while (p_.first_visible(task.first_position + end - 1) >= tile + kTileKeys) --end;
    const int64_t begin_row = first * p_.group, end_row = end * p_.group;
    load_tile(task, tile, std::min<int64_t>(kTileKeys, task.first_position + end - tile), end_row - begin_row);
    const int64_t num_blocks = (end_row - begin_row + Tiles::kRowBlock - 1) / Tiles::kRowBlock;
    const int64_t size = (end_row - begin_row + num_blocks - 1) / num_blocks;  // about the same for all blocks
    for (int64_t row = begin_row; row < end_row; row += size)
      attend_rows(task, tile, row, int(std::min(size, end_row - row)), part);
  }

  // Copies the tile's first `num_keys` keys out of their blocks, and passes values to Tiles, which packs them or reads
  // them in place. Columns without a key keep what they held; their scores are masked. Between copies, and then twice
  // per row, the next tile is prefetched.
  void load_tile(const Task& task, int64_t tile, int64_t num_keys, int64_t rows) {
    int64_t entries[kTileKeys];
    std::copy_n(entries_, kTileKeys, entries);
    const bool is_last = tile + kTileKeys > task.last_position();
    if (!is_last) find_entries(task, tile + kTileKeys);
    if (is_last && then_) find_entries(*then_, first_tile(*then_, then_->first_split));
    prefetched_ = is_last && !then_ ? kTileKeys : 0;
    keys_per_turn_ = divide_up(kTileKeys, 2 * kTileVecs + 2 * rows);
    for (int key = 0; key < kTileKeys; key += kLanes) {
      if (key < num_keys) Tiles::load_keys(p_.key_cache, p_.key_row, p_.head_size, entries + key, keys_ + key);
      prefetch_keys();
      tiles_.load_values(p_.value_cache, p_.value_row, p_.value_row_numbers, p_.value_size, entries, key, num_keys,
                         values_);
      prefetch_keys();
    }
  }

  // Prefetches a few keys at a time, since a core drops prefetches beyond its fill buffers, and one of each sixteen in
  // turn, so that they come from several places at once.
  void prefetch_keys() {
    const int64_t end = std::min<int64_t>(kTileKeys, prefetched_ + keys_per_turn_);
    for (; prefetched_ < end; ++prefetched_) {
      const int64_t entry = entries_[prefetched_ % kTileVecs * kLanes + prefetched_ / kTileVecs];
      prefetch(p_.key_cache + entry * p_.key_row, p_.key_row);
      if (p_.value_cache != p_.key_cache) prefetch(p_.value_cache + entry * p_.value_row, p_.value_row);
    }
  }

  // Prefetches the lines that begin in a row: a line is the row's before, too, where it began there.
  static void prefetch(const Stored* row, int64_t count) {
    constexpr uintptr_t kLine = 64;
    const auto begin = reinterpret_cast<uintptr_t>(row), end = begin + count * sizeof(Stored);
    for (uintptr_t line = (begin + kLine - 1) & -kLine; line < end; line += kLine)
      __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
  }

  // Finds the cache entries of positions [tile, tile + kTileKeys); any valid entry beyond the task's last position.
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

  // One step of the online softmax for some rows: their scores, then weights relative to the largest scores so far,
  // then the sums, to which `factors` bring what was summed relative to the old ones. All rows do each of these before
  // any does the next, without branches: a row has a new largest score in every third tile, which no CPU predicts.
  void attend_rows(const Task& task, int64_t tile, int64_t first_row, int rows, State& part) {
    tiles_.score(rows, queries_ + first_row * num_words_, keys_, num_words_, scores_);
    alignas(64) float largest[kLanes], drops[kLanes] = {}, factors[kLanes];
    int begin = kTileKeys, end = 0;  // the keys that any of the rows sees
    int64_t position = task.first_position + first_row / p_.group, head = first_row % p_.group;
    for (int i = 0; i < rows; ++i) {
      const int first = int(std::max<int64_t>(0, p_.first_visible(position) - tile));
      const int last = int(std::min<int64_t>(kTileKeys, position + 1 - tile));
      prefetch_keys();
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
      prefetch_keys();
      float* lane_totals = lane_totals_ + (first_row + i) * kLanes;
      store(lane_totals, fma(load(lane_totals), broadcast(factors[i]), weigh_row(i, maxima[i])));
    }
    tiles_.add(rows, scores_, factors, values_, begin, end, stride_, part.out + first_row * stride_);
  }

  // Returns the largest of a row's scores for the keys [begin, end), which it sees, and masks the others.
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

  // Merges the next split's softmax into that of the splits before it. A row that saw no key in the split (else its
  // total is at least 1, the weight of its largest score, or NaN) stays as it is.
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
      for_each_vector(p_.value_size, [&](int64_t column, int64_t count) {
        const Vec sums = Tiles::load_sums(whole.out + row * stride_, p_.value_size, column);
        store_upto(target + column, count, fma(sums, norm, Vec{}));  // + 0: no result is -0
      });
    }
  }

  // Returns 1 / (sum of all weights), with the head's sink.
  float normalizer(float maximum, float total, int64_t head) const {
    if (!p_.sinks) return 1.0f / total;
    const float score = p_.softcap > 0 ? maximum : maximum * p_.scaling;
    const float sink = p_.sinks[head], largest = std::max(score, sink), factor = exp_nonpositive(score - largest);
    return factor / (total * factor + exp_nonpositive(sink - largest));
  }

  const ProblemOf<Tiles>& p_;
  Tiles tiles_;
  const int64_t num_words_, stride_, state_floats_;
  const Task* then_ = nullptr;
  int64_t entries_[kTileKeys];          // of the tile to load next: row numbers in the cache
  int64_t prefetched_ = 0;              // keys of that tile that were prefetched
  int64_t keys_per_turn_ = 0;
  float *queries_, *keys_, *values_;    // [max_rows, num_words_], [num_words_, kTileKeys], as Tiles has it
  float *scores_, *lane_totals_;        // [Tiles::kRowBlock, kTileKeys], [max_rows, kLanes]
  float *part_memory_, *whole_memory_;  // a State each
};

}  // namespace twostep::attention
