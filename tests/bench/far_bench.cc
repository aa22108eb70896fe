// SPDX-License-Identifier: Apache-2.0
//
// far_bench [MIB]: reads files of a changed layout out of sources that lie 20 ms
// away behind a line of 200 MB/s (tests/support/slow_root.h): by 1 MiB requests as
// FUSE sends them, and filled in parallel; through a block cache of a mount's size.
// Prints the time as a multiple of what the distinct bytes take on that line, and
// what was fetched, of two things:
//
//   distinct  the blocks (of 64 KiB, the unit that is fetched) that the ranks need
//             something of, each once; of columns that is all of the files, for one
//             rank as for all
//   asked     the source bytes of the elements that the ranks show, each once

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "core/io/memory_root.h"
#include "core/view/plan_reader.h"
#include "tests/support/slow_root.h"

namespace ckptfs {
namespace {

constexpr uint64_t kColumns = 4096;
constexpr uint64_t kRequest = 1 << 20;
constexpr uint64_t kFiles = 8;    // ranks at the source, a slice of the rows each
constexpr uint64_t kRanks = 8;    // of the target
constexpr uint64_t kSmall = 128;  // MiB, which a mount's cache holds

// An fp32 matrix whose rows lie in kFiles files, in memory.
struct Source {
  explicit Source(uint64_t bytes)
      : rows(bytes / sizeof(float) / kColumns / kFiles * kFiles),
        memory(std::make_shared<MemoryRoot>("far")) {
    model.roots = {"far"};
    model.parameters.resize(1);
    Atom atom;
    atom.shape = {rows, kColumns};
    Gather gather;
    gather.locals = {WholeTensor(atom.shape)};
    FragmentSeries series;
    series.elements = series.flat_step = rows * kColumns / kFiles;
    series.count = kFiles;
    series.blob_step = 1;
    gather.series = {series};
    atom.source.gathers = {gather};
    model.atoms = {atom};
    for (uint64_t i = 0; i < kFiles; ++i) {
      auto data = std::make_shared<std::vector<float>>(series.elements, static_cast<float>(i));
      Blob blob;
      blob.path = "rank" + std::to_string(i);
      const auto rope = std::as_bytes(std::span(*data));
      if (!memory->Add(blob.path, {rope}, std::move(data), {})) abort();
      blob.stamp = memory->Stat(blob.path)->stamp;
      model.blobs.push_back(blob);
    }
  }
  uint64_t rows;
  std::shared_ptr<MemoryRoot> memory;
  StepModel model;
};

// Rank `rank` of kRanks, as bf16: a slice of the rows, or of the columns.
Plan RankPlan(const Source& source, uint64_t rank, bool columns) {
  const uint64_t rows = columns ? source.rows : source.rows / kRanks;
  const uint64_t width = columns ? kColumns / kRanks : kColumns;
  const std::vector<uint64_t> begin = {columns ? 0 : rank * rows, columns ? rank * width : 0};
  LocalTensor slice{{rows, width}, {Piece{{rows, width}, begin, 0, {width, 1}, 1.0}}};
  PlanBuilder builder;
  builder.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(std::move(slice)), 0, rows * width,
               DType::kBF16);
  return std::move(builder).Finish();
}

void ReadAll(const PlanReader& reader, uint64_t size, bool parallel) {
  std::vector<std::byte> out(parallel ? size : kRequest);
  if (parallel) {
    if (!reader.ReadParallel(0, out)) abort();
    return;
  }
  for (uint64_t at = 0; at < size; at += kRequest) {
    if (!reader.Read(at, out)) abort();
  }
}

// `ranks` files read one after the other, or by a thread each.
void Measure(const char* name, const Source& source, bool columns, uint64_t ranks, bool parallel,
             bool together) {
  const auto slow = std::make_shared<SlowRoot>(source.memory, SlowRoot::Line{});
  BlobReader::Options options;  // with a cache as each loaded step of a mount has
  options.open_roots["far"] = slow;
  const auto blobs = BlobReader::Create(source.model, options);
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    const auto work = [&, rank] {
      const Plan plan = RankPlan(source, rank % kRanks, columns);
      ReadAll(PlanReader(plan, source.model, *blobs), plan.size(), parallel);
    };
    if (together) threads.emplace_back(work);
    if (!together) work();
  }
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const uint64_t all = source.rows * kColumns * sizeof(float);
  const uint64_t asked = all / kRanks * std::min(ranks, kRanks);
  // If ranks read columns, every block holds all ranks' bytes.
  const uint64_t distinct = columns ? all : asked;
  const SlowRoot::Counts counts = slow->counts();
  const double ideal = static_cast<double>(distinct) / SlowRoot::Line{}.bytes_per_second;
  const auto fetched = static_cast<double>(counts.bytes);
  printf("%-44s %8.2f s %8.2fx %8.3f %8.3f %6llu %6llu\n", name, took.count(), took.count() / ideal,
         fetched / static_cast<double>(distinct), fetched / static_cast<double>(asked),
         static_cast<unsigned long long>(counts.most_reads_of_a_byte),
         static_cast<unsigned long long>(counts.most_in_flight));
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) {
  const uint64_t mib = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1024;
  printf("%-44s %10s %9s %8s %8s %6s %6s\n", "", "time", "of ideal", "distinct", "asked", "twice",
         "flying");
  {
    const ckptfs::Source source(mib << 20);
    ckptfs::Measure("one rank's rows, by 1 MiB", source, false, 1, false, false);
    ckptfs::Measure("one rank's rows, filled", source, false, 1, true, false);
    ckptfs::Measure("one rank's columns, by 1 MiB", source, true, 1, false, false);
    ckptfs::Measure("one rank's columns, filled", source, true, 1, true, false);
    ckptfs::Measure("8 ranks' rows at once", source, false, 8, false, true);
    ckptfs::Measure("8 ranks' columns at once", source, true, 8, false, true);
    ckptfs::Measure("16 readers of 8 ranks' columns at once", source, true, 16, false, true);
    ckptfs::Measure("8 ranks' rows, one after the other", source, false, 8, true, false);
    ckptfs::Measure("8 ranks' columns, one after the other", source, true, 8, true, false);
  }
  const ckptfs::Source small(std::min(mib, ckptfs::kSmall) << 20);
  ckptfs::Measure("of what the cache holds, one after the other", small, true, 8, true, false);
  return 0;
}
