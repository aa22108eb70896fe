// SPDX-License-Identifier: Apache-2.0
//
// gather_bench [MIB [DIRECTORY]]: how fast the plan reader makes bytes out of
// files in the page cache, in requests of 1 MiB as FUSE sends them, for one and
// two threads.  Prints GB/s of the virtual file, the median of five rounds, and
// for one thread also GB per second of processor time, which is what a noisy
// machine can say.

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/model/box_index.h"
#include "core/view/plan_reader.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs {
namespace {

constexpr uint64_t kRequest = 1 << 20;
constexpr uint64_t kColumns = 4096;  // of the fp32 source: 16 KiB rows

struct Case {
  std::string name;
  StepModel model;
  Plan plan;
};

void WriteSource(const std::string& path, uint64_t bytes) {
  std::ofstream file(path, std::ios::binary);
  std::vector<float> block(1 << 18);
  for (uint64_t done = 0; done < bytes; done += block.size() * sizeof(float)) {
    for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<float>(done / 4 + i) * 1e-3f;
    file.write(reinterpret_cast<const char*>(block.data()),
               static_cast<std::streamsize>(block.size() * sizeof(float)));
  }
}

// One fp32 atom [rows, kColumns] stored in `fragment_elements` pieces, shown as `target`.
Case MakeCase(std::string name, const std::string& directory, const BlobStamp& stamp,
              const Shape& shape, uint64_t fragment_elements, LocalTensor target, DType shown) {
  Case made;
  made.name = std::move(name);
  made.model.roots = {directory};
  made.model.parameters.resize(1);
  Blob blob;
  blob.path = std::string("source.bin");
  blob.stamp = stamp;
  made.model.blobs = {blob};
  Atom atom;
  atom.shape = shape;
  Gather gather;
  gather.locals = {WholeTensor(shape)};
  const uint64_t elements = *ElementCount(shape);
  FragmentSeries series;
  series.elements = fragment_elements;
  series.flat_step = fragment_elements;
  series.count = static_cast<uint32_t>(elements / fragment_elements);
  series.offset_step = static_cast<int64_t>(fragment_elements * sizeof(float));
  gather.series = {series};
  atom.source.gathers = {gather};
  made.model.atoms = {atom};
  const uint64_t n = *ElementCount(target.shape);
  PlanBuilder builder;
  builder.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(std::move(target)), 0, n, shown);
  made.plan = std::move(builder).Finish();
  return made;
}

// Columns [begin, begin + count) of [rows, columns].
LocalTensor ColumnSlice(uint64_t rows, uint64_t begin, uint64_t count) {
  return LocalTensor{{rows, count}, {Piece{{rows, count}, {0, begin}, 0, {count, 1}, 1.0}}};
}

LocalTensor Transposed(uint64_t rows, uint64_t columns) {
  return LocalTensor{{columns, rows}, {Piece{{rows, columns}, {0, 0}, 0, {1, rows}, 1.0}}};
}

// The source as a grid of boxes behind each other, as ranks of a mesh hold them.
Gather GridOf(uint64_t rows, bool indexed) {
  constexpr uint64_t kHeight = 8;
  constexpr uint64_t kWidth = 8;
  Gather grid;
  for (uint64_t row = 0; row + kHeight <= rows; row += kHeight) {
    for (uint64_t column = 0; column < kColumns; column += kWidth) {
      const Shape box{kHeight, kWidth};
      FragmentSeries series;
      series.local = static_cast<uint32_t>(grid.locals.size());
      series.elements = series.flat_step = kHeight * kWidth;
      series.offset = series.local * series.elements * sizeof(float);
      grid.locals.push_back({box, {Piece{box, {row, column}, 0, {kWidth, 1}, 1.0}}});
      grid.series.push_back(series);
    }
  }
  if (indexed) grid.index = BoxIndex::Of(grid.locals);
  return grid;
}

double ProcessorSeconds() {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct Rates {
  double wall = 0;
  double processor = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Rates Measure(const Case& test, unsigned threads) {
  const auto blobs = BlobReader::Create(test.model, {});
  const PlanReader reader(test.plan, test.model, *blobs);
  const auto work = [&](unsigned thread) {
    std::vector<std::byte> buffer(kRequest);
    for (uint64_t at = thread * kRequest; at < test.plan.size(); at += threads * kRequest) {
      if (!reader.Read(at, buffer)) abort();
    }
  };
  std::vector<double> wall, processor;
  for (int round = 0; round < 6; ++round) {
    const double used = ProcessorSeconds();
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> crew;
    for (unsigned t = 1; t < threads; ++t) crew.emplace_back(work, t);
    work(0);
    for (std::thread& one : crew) one.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (round == 0) continue;
    const double gigabytes = static_cast<double>(test.plan.size()) / 1e9;
    wall.push_back(gigabytes / took.count());
    processor.push_back(gigabytes / (ProcessorSeconds() - used));
  }
  return Rates{Median(wall), Median(processor)};
}

int Run(uint64_t bytes, const std::string& directory) {
  const std::string path = directory + "/source.bin";
  WriteSource(path, bytes);
  const BlobStamp stamp = *StampOfFile(path);
  const uint64_t rows = bytes / sizeof(float) / kColumns;  // of the grids a sixteenth
  const uint64_t elements = rows * kColumns;
  const Shape shape{rows, kColumns};
  const LocalTensor whole = WholeTensor(shape);
  const auto make = [&](std::string name, uint64_t fragment, LocalTensor target, DType shown) {
    return MakeCase(std::move(name), directory, stamp, shape, fragment, std::move(target), shown);
  };
  const auto grid = [&](std::string name, bool indexed) {
    const Shape part{rows / 16, kColumns};
    Case made = MakeCase(std::move(name), directory, stamp, part, part[0] * kColumns,
                         WholeTensor(part), DType::kF32);
    made.model.atoms[0].source.gathers = {GridOf(part[0], indexed)};
    return made;
  };
  const uint64_t boxes = elements / 16 / 64;
  const Case cases[] = {
      make("contiguous", elements, whole, DType::kF32),
      make("contiguous, 64 KiB fragments", 1 << 14, whole, DType::kF32),
      make("4 KiB runs", elements, ColumnSlice(rows, 1024, 1024), DType::kF32),
      make("64-byte runs", elements, ColumnSlice(rows, 1024, 16), DType::kF32),
      make("fp32 -> bf16", elements, whole, DType::kBF16),
      make("fp32 -> fp16", elements, whole, DType::kF16),
      make("4 KiB runs, fp32 -> bf16", elements, ColumnSlice(rows, 1024, 1024), DType::kBF16),
      make("transposed", elements, Transposed(rows, kColumns), DType::kF32),
      grid(std::to_string(boxes) + " boxes, 32-byte runs", true),
      grid(std::to_string(boxes) + " boxes, without an index", false),
  };
  printf("%-32s %10s %10s %10s\n", "GB/s out", "1 thread", "per CPU s", "2 threads");
  for (const Case& test : cases) {
    const Rates one = Measure(test, 1);
    printf("%-32s %10.2f %10.2f %10.2f\n", test.name.c_str(), one.wall, one.processor,
           Measure(test, 2).wall);
  }
  unlink(path.c_str());
  return 0;
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) {
  const uint64_t mib = argc > 1 ? strtoull(argv[1], nullptr, 10) : 512;
  char name[] = "/tmp/ckptfs_bench_XXXXXX";
  const std::string directory = argc > 2 ? argv[2] : mkdtemp(name);
  const int result = ckptfs::Run(mib << 20, directory);
  if (argc <= 2) rmdir(directory.c_str());
  return result;
}
