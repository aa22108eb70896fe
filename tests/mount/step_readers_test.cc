// SPDX-License-Identifier: Apache-2.0

#include "mount/control/step_readers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "mount/control/control_protocol.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

const Layout kLayout = *Layout::Parse("tp1");

// A program that reads.
class Reading {
 public:
  Reading() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ours_ = Descriptor(ends[0]);
    theirs = Descriptor(ends[1]);
  }
  std::string Line() {
    std::string line;
    for (char letter = 0; recv(ours_.get(), &letter, 1, 0) == 1 && letter != '\n';) line += letter;
    return line;
  }
  // The bytes, or the line that says why not.
  std::string Ask(const std::string& request) {
    EXPECT_TRUE(SendMessage(ours_.get(), request));
    const std::string head = Line();
    if (head.empty() || head[0] == '-') return head;
    std::string bytes(std::stoul(head), '\0');
    EXPECT_EQ(recv(ours_.get(), bytes.data(), bytes.size(), MSG_WAITALL),
              static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  Descriptor theirs;

 private:
  Descriptor ours_;
};

TEST(StepReadersTest, AReaderGoesOnFromTheStoreAndHoldsNoMemoryMeanwhile) {
  testing::TreeFixture t;
  std::weak_ptr<const std::string> memory;
  const StepRecord record = t.HoldStep("run", "7", 7, 3, 4096, &memory);
  StepReaders readers(t.catalogue(), std::chrono::milliseconds(1));
  Reading program;
  ASSERT_TRUE(readers.Begin(program.theirs, "run", "7", kLayout, "hello"));
  EXPECT_FALSE(program.theirs.valid());
  EXPECT_EQ(program.Line(), "hello");
  const std::string file = "file 0 10000000 rank0/model.safetensors";
  const std::string bytes = program.Ask(file);
  EXPECT_GT(bytes.size(), testing::kRows * testing::kColumns * 4);
  EXPECT_EQ(program.Ask("file 0 1 rank0/none")[0], '-');
  EXPECT_FALSE(memory.expired());
  ASSERT_TRUE(t.catalogue().Persist(record));
  while (!memory.expired()) std::this_thread::yield();
  EXPECT_EQ(program.Ask(file), bytes);
  EXPECT_EQ(readers.Begin(program.theirs, "run", "7", kLayout, "").error().code,
            ErrorCode::kNotFound);
}

TEST(StepReadersTest, AStepThatIsDroppedIsAnAnswerAndTooManyAreRefused) {
  testing::TreeFixture t;
  std::weak_ptr<const std::string> memory;
  const StepRecord record = t.HoldStep("run", "7", 7, 3, 4096, &memory);
  StepReaders readers(t.catalogue());
  std::vector<std::unique_ptr<Reading>> programs;
  for (size_t i = 0; i < StepReaders::kMost; ++i) {
    programs.push_back(std::make_unique<Reading>());
    ASSERT_TRUE(readers.Begin(programs[i]->theirs, "run", "7", kLayout, "hello")) << i;
    EXPECT_EQ(programs[i]->Line(), "hello");
  }
  Reading late;
  EXPECT_EQ(readers.Begin(late.theirs, "run", "7", kLayout, "hello").error().code,
            ErrorCode::kExhausted);
  EXPECT_TRUE(late.theirs.valid());
  programs.pop_back();  // a program that ends makes room
  while (!readers.Begin(late.theirs, "run", "7", kLayout, "hello")) std::this_thread::yield();
  ASSERT_TRUE(t.catalogue().Release(record));
  EXPECT_EQ(programs[0]->Ask("step")[0], '-');
}

}  // namespace
}  // namespace ckptfs
