// SPDX-License-Identifier: Apache-2.0
//
// A small store with steps made of one source file each, a view format that
// can be told to refuse, and a filesystem over both.  Every byte of a view file
// can be computed here without a plan (`Expected`), so that what is read can be
// compared with rendering everything.
//
// Thread safety: build it in one thread; the filesystem is as safe as ever.
// Lifetime: removes its directory when it goes.

#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/store/step_catalogue.h"
#include "core/view/view_format.h"
#include "fs/filesystem.h"

namespace ckptfs::testing {

inline constexpr uint64_t kRows = 512;
inline constexpr uint64_t kColumns = 1024;  // "big.weight" is [512, 1024] fp32: 2 MiB

// view/<layout>/rank<N>/{model.bin,small.json,whole.bin,link} and
// view/<layout>/extra/note: model.bin is a literal, the rank's rows of
// "big.weight", and zeros up to 4 KiB; whole.bin is the source file.
class FakeFormat : public ViewFormat {
 public:
  explicit FakeFormat(std::string name = "rank") : name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  // The format must outlive its views.
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

  std::atomic<uint64_t> max_tp{16};
  mutable std::atomic<int> throws{0};     // so many opens throw
  std::atomic<uint64_t> view_bytes{100};  // the memory that a view says it takes
  mutable std::atomic<uint64_t> opens{0};
  mutable std::atomic<uint64_t> lists{0};
  mutable std::atomic<uint64_t> finds{0};
  mutable std::atomic<uint64_t> plans{0};

 private:
  const std::string name_;
};

class TreeFixture {
 public:
  TreeFixture();
  // Shows these formats instead of a FakeFormat.
  explicit TreeFixture(std::vector<std::unique_ptr<ViewFormat>> formats);
  ~TreeFixture();

  // Publish a step of the source file `file`, which is written if it is not
  // there or has other bytes than those of `seed`.
  StepRecord AddStep(const std::string& run, const std::string& id, uint64_t iteration,
                     uint32_t seed = 1, uint32_t mode = 0644, const std::string& file = "data.bin");

  // The same step without a file: in memory, in pieces of `piece` bytes that live
  // as long as `*bytes`.
  StepRecord HoldStep(const std::string& run, const std::string& id, uint64_t iteration,
                      uint32_t seed, size_t piece, std::weak_ptr<const std::string>* bytes,
                      StepPlace place = StepPlace::kStep);

  // The whole source file of a seed, and any file of a layout of it.
  static std::string SourceBytes(uint32_t seed);
  // Writes the file that AddStep will take, and says that it is old: whatever happens to
  // it later is another time.
  void WriteOldSource(const std::string& run, const std::string& id, uint32_t seed);
  static std::string Expected(uint32_t seed, const Layout& layout, std::string_view path);

  Filesystem& Mount(FilesystemOptions options = {});
  void Unmount() { filesystem_.reset(); }
  Filesystem& fs() { return *filesystem_; }
  Store& store() { return *store_; }
  StepCatalogue& catalogue() { return *catalogue_; }
  FakeFormat& format() { return *format_; }
  std::string directory() const { return directory_.string(); }
  std::string SourcePath(const std::string& run, const std::string& id,
                         const std::string& file = "data.bin") const;
  std::vector<std::string> Log() const;

  // Look a path up from the root, following symbolic links below it; each
  // component's reference is kept until Forget(all).
  Result<Attributes> Walk(std::string_view path, const Caller& caller = {});
  Result<std::vector<std::string>> List(std::string_view path, const Caller& caller = {});
  Result<std::string> ReadAll(std::string_view path, const Caller& caller = {});

 private:
  std::filesystem::path directory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<StepCatalogue> catalogue_;
  std::vector<std::unique_ptr<ViewFormat>> formats_;
  FakeFormat* format_ = nullptr;
  std::unique_ptr<Filesystem> filesystem_;
  std::shared_ptr<struct LogLines> log_;
};

// An accident that may happen to a file while it is read.
struct Accident {
  const char* name;
  std::function<void(const std::string& path)> happen;
  bool same = true;  // its bytes are what they were, and it is the same file
};
std::vector<Accident> Accidents();

// Lines that were logged; shared with the filesystem that logs.
struct LogLines {
  mutable Mutex mutex;
  std::vector<std::string> lines GUARDED_BY(mutex);
};

// Reads a whole open file in pieces of `piece` bytes.
Result<std::string> ReadHandle(Filesystem& fs, FileHandle handle, size_t piece = 100'000);

}  // namespace ckptfs::testing
