// SPDX-License-Identifier: Apache-2.0
//
// The trainer and the daemon are killed at every message that they send or receive and
// between the steps by which a snapshot becomes durable (core/base/fault_point.h), one
// after the other until a run goes through.  After each kill the store has no half
// save, the other side goes on, and the next save works.  While the trainer lives its saves
// become durable, each once, however often daemons die.
//
// The defects of published systems that snapshots must not have, and what shows it:
//
//   ranks commit one by one            receiver_test: AStepHasThePartsOfAllRanks;
//                                      received_step_test
//   the wait before an update waits    receiver_test: EverySaveHoldsTheMomentOfItsSave,
//   for some of the queues             schedule_test: WhateverHappensAStepIsTheTruthOrNothing
//   data is written, then its file     storage_suite: NothingUnderTheNameBeforeClose;
//   truncated; no sync, no rename      snapshot_store_test: WheneverTheMachineStops...;
//                                      file_storage_faults_test, disk_faults_test
//   memory is freed under a copy       copies_test: MemoryIsThereUntilItIsCopiedAndNoLonger;
//                                      test_late_writes.py: test_memory_outlives_its_owners
//   no checksums                       snapshot_store_test: BytesThatChangeBefore...
//   a short write goes on elsewhere    file_storage_faults_test: AShortWriteGoesOnWhereItEnded;
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
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/base/runtime_directory.h"
#include "core/io/file_root.h"
#include "core/store/step_catalogue.h"
#include "mount/daemon/snapshot_keeper.h"
#include "snapshot/receive/arena_shelf.h"
#include "tests/snapshot/killed.h"
#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using testing_support::ExpectVerified;
using testing_support::kForks;
using testing_support::Killed;
using testing_support::kLong;
using testing_support::kMostPoints;
using testing_support::RankMemory;
using testing_support::WithoutProof;

std::unique_ptr<Spooler> SpoolerAt(const std::string& directory) {
  if (directory.empty()) return nullptr;
  SpoolerOptions options;
  options.budget = 1 << 24;
  options.patience = std::chrono::milliseconds(0);
  options.log = [](std::string_view line) { ADD_FAILURE() << line; };
  return std::make_unique<Spooler>(*Spool::Open(directory, "store"), std::move(options));
}

// Steps of a store which, where there is a spool, have all lain there.
class SpooledSteps final : public StepMaker {
 public:
  SpooledSteps(Store& store, StepCatalogue& catalogue, bool spooled)
      : keeper_(store, catalogue, [](const StepRecord&) { return Status(); }), spooled_(spooled) {}
  Result<Entered> Enter(const std::shared_ptr<SaveBytes>& save) override {
    while (spooled_ && !save->on_disk()) std::this_thread::yield();
    return keeper_.Enter(save);
  }
  Result<StepRecord> Persist(const StepRecord& record) override { return keeper_.Persist(record); }
  void Release(const StepRecord& record) override { keeper_.Release(record); }
  Result<std::optional<StepRecord>> FindStored(const PartAgain& part) override {
    return keeper_.FindStored(part);
  }
  std::shared_ptr<BlobStream> Stream(const std::string&, uint64_t,
                                     std::weak_ptr<const void>) override {
    return nullptr;
  }
  void Tell(const News&) override {}

 private:
  SnapshotKeeper keeper_;
  const bool spooled_;
};

// A daemon that dies when it has a step whole.
class DyingDaemon {
 public:
  explicit DyingDaemon(const std::string& directory, std::shared_ptr<ArenaShelf> shelf = nullptr)
      : landing_({.steps = &steps_}) {
    steps_.keep = [](const SaveBytes&) -> Status {
      raise(SIGKILL);
      return {};
    };
    ReceiverOptions options;
    options.store = directory;
    options.memory_bytes = 4 << 20;
    options.chunk_bytes = testing_support::kSmallChunk;
    options.landing = &landing_;
    options.shelf = std::move(shelf);
    receiver_ = *Receiver::Start(std::move(options));
  }
  uint64_t ranks() const { return receiver_->status().ranks; }

 private:
  testing_support::FakeSteps steps_;
  Landing landing_;
  std::unique_ptr<Receiver> receiver_;
};

// A daemon that receives snapshots, without a mount.
class StoreDaemon {
 public:
  // `spool`: where all steps go before the store has them; empty: nowhere.
  explicit StoreDaemon(const std::string& directory, std::shared_ptr<ArenaShelf> shelf = nullptr,
                       const std::string& spool = "",
                       uint64_t chunk_bytes = testing_support::kSmallChunk)
      : store_(*Store::Open(directory, true)),
        catalogue_(*store_),
        spooler_(SpoolerAt(spool)),
        steps_(*store_, catalogue_, spooler_ != nullptr),
        landing_({.steps = &steps_, .spooler = spooler_.get()}) {
    ReceiverOptions options;
    options.store = directory;
    options.memory_bytes = 4 << 20;
    options.chunk_bytes = chunk_bytes;
    options.landing = &landing_;
    options.shelf = std::move(shelf);
    receiver_ = *Receiver::Start(std::move(options));
  }
  // Nobody is connected, and what was received is stored or dropped.
  void Settle() const {
    while (true) {
      const ReceiverStatus status = receiver_->status();
      if (status.ranks == 0 && status.saves.waiting == 0) return;
      std::this_thread::yield();
    }
  }

 private:
  const std::unique_ptr<Store> store_;
  StepCatalogue catalogue_;
  const std::unique_ptr<Spooler> spooler_;
  SpooledSteps steps_;
  Landing landing_;
  std::unique_ptr<Receiver> receiver_;
};

// FakeManager stands for systemd: it keeps descriptors while daemons come and go.
class FakeManager {
 public:
  FakeManager() : path_(StrCat(directory_.path(), "/notify")) {
    const sockaddr_un address = *SocketAddress(path_);
    socket_ = Descriptor(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  // Does what the daemons have asked for.
  void Hear() {
    while (true) {
      char text[1000];
      iovec part{text, sizeof text};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr in{};
      in.msg_iov = &part;
      in.msg_iovlen = 1;
      in.msg_control = control;
      in.msg_controllen = sizeof control;
      const ssize_t got = recvmsg(socket_.get(), &in, MSG_CMSG_CLOEXEC);
      if (got < 0) return;
      const std::string said(text, static_cast<size_t>(got));
      const std::string name = said.substr(said.find("FDNAME=") + 7);
      std::erase_if(kept_, [&](const auto& one) { return one.name == name; });
      if (!said.starts_with("FDSTORE=1\n")) continue;
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&in)), sizeof fd);
      kept_.push_back({name, Descriptor(fd)});
    }
  }
  // In a daemon's process.
  std::shared_ptr<ArenaShelf> Shelf(const std::string& store) const {
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
    std::vector<DescriptorStore::Kept> passed;
    for (const auto& one : kept_)
      passed.push_back({one.name, Descriptor(dup(one.descriptor.get()))});
    return ArenaShelf::Open(DescriptorStore::Find(), std::move(passed), store);
  }
  std::vector<DescriptorStore::Kept>& kept() { return kept_; }

 private:
  const TemporaryDirectory directory_;
  const std::string path_;
  Descriptor socket_;
  std::vector<DescriptorStore::Kept> kept_;
};

class KillTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!kForks) GTEST_SKIP();
  }
  // A rank that declares what it holds; its step is told by its bytes.
  Capture CaptureAt(uint64_t step) {
    memory_->Fill(static_cast<unsigned char>(step));
    Capture capture = memory_->Save(step, 0);
    if (!base_.empty()) {
      CapturedTensor base;
      base.parameter = "base";
      base.kind = "weight";
      base.shape = {base_.size() / 4};
      base.from = reinterpret_cast<const std::byte*>(base_.data());
      capture.tensors.push_back(std::move(base));
    }
    for (const CapturedTensor& tensor : capture.tensors) {
      capture.parameters.push_back({tensor.parameter, "trainable"});
    }
    return capture;
  }
  // Each tensor is what it was, wherever its bytes lie.
  void ExpectValues(const Store& store, const StepModel& model, uint64_t step) {
    for (const CapturedTensor& tensor : CaptureAt(step).tensors) {
      const auto parameter = model.FindParameter(tensor.parameter);
      ASSERT_TRUE(parameter) << tensor.parameter;
      const Atom& atom = model.atom(*model.FindAtom(*parameter, "weight"));
      const Fragment fragment = atom.source.gathers.at(0).series.at(0).At(0);
      const auto file = FileRoot(store.blobs()).Open(model.blob(fragment.blob).path);
      ASSERT_TRUE(file) << file.error().message;
      const uint64_t bytes = 4 * tensor.shape[0];
      const auto read = (*file)->Read(fragment.offset, bytes, tensor.parameter);
      ASSERT_TRUE(read) << read.error().message;
      EXPECT_TRUE(std::memcmp(read->data(), tensor.from, bytes) == 0)
          << "step " << step << ": " << tensor.parameter;
    }
  }
  WriterOptions Options(const std::string& job) const {
    return {directory_.path(), "run", job, 0, 1, 2, kLong, {}};
  }
  bool Save(SnapshotWriter& writer, uint64_t step) {
    const bool taken = writer.Save(CaptureAt(step));
    writer.WaitBeforeUpdate();
    return taken;
  }
  bool SaveDurably(SnapshotWriter& writer, uint64_t step) {
    return Save(writer, step) && writer.WaitDurable(step, kLong);
  }
  // All that the store shows of the step is whole; whether it is there.
  bool IsStored(uint64_t step) {
    const auto store = *Store::Open(directory_.path(), true);
    const auto record = store->Resolve("run", StrCat(step));
    if (!record) return false;
    const auto steps = store->Steps("run");
    EXPECT_EQ(std::count_if(steps->begin(), steps->end(),
                            [&](const StepRecord& one) { return one.iteration == step; }),
              1)
        << step;
    const auto loaded = store->Load(*record);
    EXPECT_TRUE(loaded) << loaded.error().message;
    if (!loaded) return true;
    ExpectValues(*store, (*loaded)->model, step);
    ExpectVerified(**loaded);
    pointed_ += (*loaded)->model.blobs.size() > 1 ? 1 : 0;
    if (!base_.empty()) return true;
    const auto bytes = ReadWhole(FileRoot(store->blobs()), (*loaded)->model.blobs[0].path, 1 << 24);
    EXPECT_TRUE(bytes) << bytes.error().message;
    const auto file = CaptureFile::Make(CaptureAt(step), 0, 1);
    std::string truth(file->bytes(), '\0');
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
        std::copy_n(reinterpret_cast<const char*>(run.from), run.bytes, truth.data() + run.at);
      }
    }
    EXPECT_TRUE(bytes && WithoutProof(*bytes) == truth) << "step " << step;
    return true;
  }

  using Work = std::function<void(const std::function<void()>& ready)>;

  // A trainer of a life of its own, which hands one step over and is gone.
  Work Gone(uint64_t step) {
    return [this, step](const std::function<void()>& ready) {
      ready();
      SnapshotWriter writer(Options(StrCat("life", step)));
      (void)Save(writer, step);
      writer.Close();
      _exit(0);
    };
  }

  // Kills the daemons of a trainer that lives.  `taken_over`: steps that daemon and trainer had
  // taken and that the next daemon finished.
  void KillDaemons(const std::string& spool, uint64_t& taken_over) {
    SnapshotWriter writer(Options("job"));
    const Work daemon = [&](const std::function<void()>& ready) {
      const StoreDaemon one(directory_.path(), nullptr, spool, chunk_bytes_);
      ready();
    };
    bool killed = true;
    for (uint64_t at = 1; killed; ++at) {
      SCOPED_TRACE(at);
      ASSERT_LT(at, kMostPoints);
      Killed first(at, daemon);
      first.WaitUntilReady();
      const bool taken = Save(writer, 10 * at);
      while (writer.status().under_way > 0 && !first.IsDead()) std::this_thread::yield();
      killed = first.End();
      EXPECT_TRUE(taken || killed);
      taken_over += taken && killed ? 1 : 0;

      Killed second(0, daemon);
      second.WaitUntilReady();
      EXPECT_EQ(taken, writer.WaitDurable(10 * at, kLong)) << writer.status().last_drop;
      EXPECT_EQ(taken, IsStored(10 * at));
      EXPECT_TRUE(SaveDurably(writer, 10 * at + 1)) << writer.status().last_drop;
      EXPECT_TRUE(IsStored(10 * at + 1));
      EXPECT_FALSE(second.End());
      while (writer.status().connected) std::this_thread::yield();
      EXPECT_TRUE(spool.empty() || Spool::Open(spool, "store")->left.empty());
    }
  }

  TemporaryDirectory directory_;
  std::unique_ptr<RankMemory> memory_ =
      std::make_unique<RankMemory>(std::vector<uint64_t>{3000, 5, 1000});
  uint64_t chunk_bytes_ = testing_support::kSmallChunk;  // of arenas
  std::string base_;      // what no step changes; empty: there is none
  uint64_t pointed_ = 0;  // stored steps that point into the file of an earlier one
};

TEST_F(KillTest, ADaemonAtEveryPoint) {
  uint64_t taken_over = 0;
  KillDaemons("", taken_over);
  EXPECT_GT(taken_over, 10u);
}

// Its files have lists of digests beside them, which are there before any step is.
TEST_F(KillTest, ADaemonAtEveryPointWithListsOfDigests) {
  chunk_bytes_ = 1 << 20;
  memory_ = std::make_unique<RankMemory>(std::vector<uint64_t>{3000, 5, 150'000});
  uint64_t taken_over = 0;
  KillDaemons("", taken_over);
  EXPECT_GT(taken_over, 10u);
  const auto store = *Store::Open(directory_.path(), true);
  const auto steps = store->Steps("run");
  ASSERT_TRUE(steps);
  for (const StepRecord& record : *steps) {
    EXPECT_NE((*store->Load(record))->model.blobs[0].chunk_list, Digest{}) << record.id;
  }
}

TEST_F(KillTest, ADaemonWithASpoolAtEveryPointWithListsOfDigests) {
  chunk_bytes_ = 1 << 20;
  memory_ = std::make_unique<RankMemory>(std::vector<uint64_t>{3000, 5, 150'000});
  uint64_t taken_over = 0;
  KillDaemons(directory_.path() + "/spool", taken_over);
  EXPECT_GT(taken_over, 15u);
}

// Steps point into the file of the one that wrote the base.
TEST_F(KillTest, ADaemonAtEveryPointWithABaseThatIsKept) {
  base_.assign(kLeastKept, 'b');
  uint64_t taken_over = 0;
  KillDaemons("", taken_over);
  EXPECT_GT(taken_over, 10u);
  EXPECT_GT(pointed_, 10u);
}

// The first dies with the whole step in memory, the second while it takes the arena over.
TEST_F(KillTest, ADaemonThatComesBackAtEveryPoint) {
  SnapshotWriter writer(Options("job"));
  const auto dies = [&](const std::function<void()>& ready) {
    const DyingDaemon one(directory_.path());
    ready();
  };
  const auto daemon = [&](const std::function<void()>& ready) {
    const StoreDaemon one(directory_.path());
    ready();
  };
  bool killed = true;
  for (uint64_t at = 1; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    Killed first(0, dies);
    first.WaitUntilReady();
    ASSERT_TRUE(Save(writer, at)) << writer.status().last_drop;
    while (!first.IsDead()) std::this_thread::yield();
    EXPECT_TRUE(first.End());

    Killed second(at, daemon);
    second.WaitUntilReady();
    while (writer.status().under_way > 0 && !second.IsDead()) std::this_thread::yield();
    killed = second.End();
    Killed third(0, daemon);
    third.WaitUntilReady();
    EXPECT_TRUE(writer.WaitDurable(at, kLong)) << writer.status().last_drop;
    EXPECT_TRUE(IsStored(at));
    EXPECT_FALSE(third.End());
    while (writer.status().connected) std::this_thread::yield();
  }
  EXPECT_EQ(writer.status().dropped, 0u);
}

// On its way through a spool.  The trainer lives: it has its arena back before the step is
// durable, and asks the next daemon what became of it.
TEST_F(KillTest, ADaemonWithASpoolAtEveryPoint) {
  uint64_t taken_over = 0;
  KillDaemons(directory_.path() + "/spool", taken_over);
  EXPECT_GT(taken_over, 15u);
}

// The trainer has gone, too: what was in the spool becomes durable, once.
TEST_F(KillTest, ADaemonWithASpoolAtEveryPointAfterTheTrainer) {
  const std::string spool = directory_.path() + "/spool";
  bool killed = true;
  uint64_t spooled = 0, stored = 0;
  for (uint64_t at = 1; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    const auto daemon = [&](const std::function<void()>& ready) {
      const StoreDaemon one(directory_.path(), nullptr, spool);
      ready();
      one.Settle();
    };
    Killed trainer(0, Gone(at));
    Killed first(at, daemon);
    first.WaitUntilReady();
    trainer.WaitUntilReady();
    EXPECT_FALSE(trainer.End());
    killed = first.End();
    const bool there = IsStored(at);
    const size_t left = Spool::Open(spool, "store")->left.size();
    EXPECT_LE(left, 1u);
    Killed second(0, daemon);
    second.WaitUntilReady();
    EXPECT_FALSE(second.End());
    EXPECT_EQ(IsStored(at), there || left == 1);
    EXPECT_TRUE(IsStored(at) || killed);
    EXPECT_TRUE(Spool::Open(spool, "store")->left.empty());
    spooled += left;
    stored += there ? 1 : 0;
  }
  EXPECT_GT(spooled, 3u);
  EXPECT_GT(stored, 1u);
}

// The trainer has gone before: what it had handed over is in its arena alone.
TEST_F(KillTest, ADaemonAtEveryPointAfterTheTrainer) {
  FakeManager manager;
  bool killed = true;
  uint64_t kept = 0, at = 1;
  for (; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    const auto daemon = [&](const std::function<void()>& ready) {
      const StoreDaemon one(directory_.path(), manager.Shelf(directory_.path()));
      ready();
      one.Settle();
    };
    Killed trainer(0, Gone(at));
    Killed first(at, daemon);
    first.WaitUntilReady();
    trainer.WaitUntilReady();
    EXPECT_FALSE(trainer.End());
    killed = first.End();
    manager.Hear();
    const bool handed_over = manager.kept().size() == 2;
    Killed second(0, daemon);
    second.WaitUntilReady();
    EXPECT_FALSE(second.End());
    manager.Hear();
    EXPECT_TRUE(manager.kept().empty());
    kept += IsStored(at) && handed_over ? 1 : 0;
    EXPECT_TRUE(IsStored(at) || killed);
  }
  EXPECT_GT(kept, 4u);  // those that were killed after the end of its part
}

// Its descriptors are as good as a stranger's.
TEST_F(KillTest, WhatAManagerHasKeptIsNotBelieved) {
  FakeManager manager;
  const auto dies = [&](const std::function<void()>& ready) {
    const DyingDaemon one(directory_.path(), manager.Shelf(directory_.path()));
    ready();
    // The last message of the trainer may still be on its way.
    while (one.ranks() != 0) std::this_thread::yield();
  };
  using Damage = std::function<void(int arena, int ledger)>;
  const auto flip = [](int fd, off_t at) {
    char byte = 0;
    EXPECT_EQ(pread(fd, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 1);
    EXPECT_EQ(pwrite(fd, &byte, 1, at), 1);
  };
  const std::vector<Damage> damages{
      [](int, int) {},
      [&](int, int ledger) { EXPECT_EQ(ftruncate(ledger, 0), 0); },
      [&](int, int ledger) { EXPECT_EQ(ftruncate(ledger, 100 + off_t{kLedgerSlot}), 0); },
      [&](int, int ledger) { flip(ledger, 0 + off_t{kLedgerSlot}); },    // its magic
      [&](int, int ledger) { flip(ledger, 21 + off_t{kLedgerSlot}); },   // bytes
      [&](int, int ledger) { flip(ledger, 100 + off_t{kLedgerSlot}); },  // its messages
      [&](int arena, int ledger) {
        const bool root = fchown(arena, 65534, 65534) == 0;
        EXPECT_EQ(ftruncate(ledger, root ? off_t{2} * off_t{kLedgerSlot} : 0), 0);
      },
      [&](int arena, int) {
        for (off_t chunk = 0; chunk < 8; ++chunk)
          flip(arena, chunk * off_t{testing_support::kSmallChunk} + 4096);
      },
      [&](int arena, int) {
        for (off_t chunk = 0; chunk < 8; ++chunk)
          flip(arena, chunk * off_t{testing_support::kSmallChunk} + 20);
      },
      [&](int, int) { manager.kept().erase(manager.kept().begin()); },
      [&](int, int) { std::swap(manager.kept()[0].descriptor, manager.kept()[1].descriptor); },
  };
  for (size_t i = 0; i < damages.size(); ++i) {
    SCOPED_TRACE(i);
    Killed trainer(0, Gone(i));
    Killed first(0, dies);
    first.WaitUntilReady();
    trainer.WaitUntilReady();
    EXPECT_FALSE(trainer.End());
    EXPECT_TRUE(first.End());
    manager.Hear();
    ASSERT_EQ(manager.kept().size(), 2u);
    ASSERT_TRUE(manager.kept()[0].name.ends_with("-arena"));
    damages[i](manager.kept()[0].descriptor.get(), manager.kept()[1].descriptor.get());
    Killed second(0, [&](const std::function<void()>& ready) {
      const StoreDaemon one(directory_.path(), manager.Shelf(directory_.path()));
      ready();
    });
    second.WaitUntilReady();
    EXPECT_FALSE(second.End());
    manager.Hear();
    EXPECT_TRUE(manager.kept().empty());
    EXPECT_EQ(IsStored(i), i == 0);
  }
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
