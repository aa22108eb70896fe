// SPDX-License-Identifier: Apache-2.0
//
// The trainer and the daemon are killed at every message that they send or receive and
// between the steps by which a snapshot becomes durable (core/base/fault_point.h), one
// after the other until a run goes through.  Whatever was killed: nothing half is in the
// store, the other side goes on, and the next save works.
//
// The defects of published systems that snapshots must not have, and what shows it:
//
//   ranks commit one by one            receiver_test: AStepHasThePartsOfAllRanks;
//                                      received_step_test
//   the wait before an update waits    receiver_test: EverySaveHoldsTheMomentOfItsSave,
//   for some of the queues             WhateverHappensAStepIsTheTruthOrNothing
//   data is written, then its file     storage_suite: NothingUnderTheNameBeforeClose;
//   truncated; no sync, no rename      snapshot_store_test: WheneverTheMachineStops...
//   memory is freed under a copy       training.h: captures own theirs (address sanitizer's build)
//   no checksums                       snapshot_store_test: BytesThatChangeBefore...
//   a short write goes on elsewhere    storage_test: LargePartsInWholePages;
//                                      snapshot_store_test: ALargeOneIsTheSameOnDisk
//   keys with separators or digits,    test_save_options.py:
//   tensors in tuples, of no elements  test_documents_of_any_shape
//   an error ends the trainer          every test here that fails something; test_snapshot.py
//   CUDA is needed; a context on       all tests run without; cuda_copier_test:
//   GPU 0 by accident                  OnlyDevicesThatAreUsedHaveAContext
//   a file or a copy per small tensor  capture_test: PiecesOfAnySizeCoverTheFileOnce
//   threads before what they use       the thread sanitizer's build
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "core/io/file_root.h"
#include "core/store/step_catalogue.h"
#include "formats/families/shipped.h"
#include "mount/snapshot_keeper.h"
#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using testing_support::kLong;
using testing_support::RankMemory;

constexpr uint64_t kMostPoints = 200;

// What a daemon does with snapshots, without a mount.
class StoreDaemon {
 public:
  explicit StoreDaemon(const std::string& directory)
      : store_(*Store::Open(directory, true)), catalogue_(*store_) {
    ReceiverOptions options;
    options.store = directory;
    options.memory_bytes = 4 << 20;
    options.chunk_bytes = testing_support::kSmallChunk;
    options.keep = [this](ReceivedStep step) { return Keep(step); };
    receiver_ = *Receiver::Start(std::move(options));
  }
  // Nobody is connected, and what was received is stored or dropped.
  void Settle() const {
    while (true) {
      const auto status = nlohmann::json::parse(receiver_->StatusJson());
      if (status["ranks"] == 0 && status["waiting"] == 0) return;
      std::this_thread::yield();
    }
  }

 private:
  Status Keep(const ReceivedStep& received) {
    CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
    CKPT_ASSIGN_OR_RETURN(MemoryStep step, MemoryStepOf(*store_, received, families));
    CKPT_ASSIGN_OR_RETURN(const StepRecord record, catalogue_.Hold(std::move(step)));
    const auto stored = catalogue_.Persist(record);
    return stored ? Status() : Fail(stored.error());
  }

  const std::unique_ptr<Store> store_;
  StepCatalogue catalogue_;
  std::unique_ptr<Receiver> receiver_;
};

// A process that is killed at its n-th point (0: never).  It says that it is ready, and goes
// on when End is called.
class Killed {
 public:
  Killed(uint64_t at, const std::function<void(std::function<void()> ready)>& work) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      if (at != 0) setenv("CKPTFS_KILL_AT", StrCat(at).c_str(), 1);
      work([&] {
        char byte = 'r';
        if (write(ends[1], &byte, 1) != 1 || read(ends[1], &byte, 1) != 1) _exit(2);
      });
      _exit(0);
    }
    close(ends[1]);
    end_ = Descriptor(ends[0]);
  }
  ~Killed() { End(); }

  void WaitUntilReady() const {
    char byte;
    if (read(end_.get(), &byte, 1) < 0) abort();  // 0: it is dead
  }
  // Whether it was killed.
  bool End() {
    if (pid_ == 0) return killed_;
    const char byte = 'e';
    (void)send(end_.get(), &byte, 1, MSG_NOSIGNAL);  // unless it is dead
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
    pid_ = 0;
    return killed_ = WIFSIGNALED(status);
  }

 private:
  pid_t pid_ = 0;
  bool killed_ = false;
  Descriptor end_;
};

class KillTest : public testing::Test {
 protected:
  // A rank that declares what it holds; its step is told by its bytes.
  Capture CaptureAt(uint64_t step) {
    memory_.Fill(static_cast<unsigned char>(step));
    Capture capture = memory_.Save(step, 0);
    for (const CapturedTensor& tensor : capture.tensors) {
      capture.parameters.push_back({tensor.parameter, "trainable"});
    }
    return capture;
  }
  WriterOptions Options(const std::string& job) const {
    return {directory_.path(), "run", job, 0, 1, 2, kLong, {}};
  }
  bool SaveDurably(SnapshotWriter& writer, uint64_t step) {
    const bool taken = writer.Save(CaptureAt(step));
    writer.WaitBeforeUpdate();
    return taken && writer.WaitDurable(step, kLong);
  }
  // All that the store shows of the step is whole; whether it is there.
  bool IsStored(uint64_t step) {
    const auto store = *Store::Open(directory_.path(), true);
    const auto record = store->Resolve("run", StrCat(step));
    if (!record) return false;
    const auto loaded = store->Load(*record);
    EXPECT_TRUE(loaded) << loaded.error().message;
    if (!loaded) return true;
    const auto bytes =
        ReadWhole(FileRoot(store->blobs()), (*loaded)->model.blobs[0].path, 1 << 24);
    EXPECT_TRUE(bytes) << bytes.error().message;
    const auto file = CaptureFile::Make(CaptureAt(step), 0, 1);
    std::string truth(file->bytes(), '\0');
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
        std::copy_n(reinterpret_cast<const char*>(run.from), run.bytes, truth.data() + run.at);
      }
    }
    EXPECT_TRUE(bytes && *bytes == truth) << "step " << step;
    return true;
  }

  TemporaryDirectory directory_;
  RankMemory memory_{{3000, 5, 1000}};
};

TEST_F(KillTest, ADaemonAtEveryPoint) {
  SnapshotWriter writer(Options("job"));
  bool killed = true;
  for (uint64_t at = 1; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    const auto daemon = [&](const std::function<void()>& ready) {
      const StoreDaemon one(directory_.path());
      ready();
    };
    Killed first(at, daemon);
    first.WaitUntilReady();
    const bool durable = SaveDurably(writer, 10 * at);
    killed = first.End();
    EXPECT_TRUE(durable || killed);
    EXPECT_TRUE(IsStored(10 * at) || !durable);
    while (writer.status().connected) std::this_thread::yield();

    Killed second(0, daemon);
    second.WaitUntilReady();
    EXPECT_TRUE(SaveDurably(writer, 10 * at + 1)) << writer.status().last_drop;
    EXPECT_TRUE(IsStored(10 * at + 1));
    EXPECT_FALSE(second.End());
    while (writer.status().connected) std::this_thread::yield();
  }
  EXPECT_GT(writer.status().dropped, 10u);
}

TEST_F(KillTest, ATrainerAtEveryPoint) {
  bool killed = true;
  uint64_t stored = 0;
  uint64_t at = 1;
  for (; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    const auto trainer = [&](uint64_t step) {
      return [this, step](const std::function<void()>& ready) {
        ready();
        SnapshotWriter writer(Options(StrCat("life", step)));
        if (!SaveDurably(writer, step)) _exit(3);
      };
    };
    // Forked while this process has no thread but this one.
    Killed first(at, trainer(10 * at));
    Killed second(0, trainer(10 * at + 1));
    const StoreDaemon daemon(directory_.path());
    first.WaitUntilReady();
    killed = first.End();
    second.WaitUntilReady();
    EXPECT_FALSE(second.End());
    daemon.Settle();
    const bool there = IsStored(10 * at);
    EXPECT_TRUE(there || killed);
    stored += there ? 1 : 0;
    EXPECT_TRUE(IsStored(10 * at + 1));
  }
  // Those that were killed after the end of their part, and the one that went through.
  EXPECT_GT(stored, 1u);
  EXPECT_LT(stored, at / 2);
}

}  // namespace
}  // namespace ckptfs
