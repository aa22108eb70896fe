// SPDX-License-Identifier: Apache-2.0

#include "mount/options.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

namespace ckptfs {
namespace {

using Words = std::vector<std::string>;

Result<Words> Translate(Words words) {
  return TranslateMountWords(std::move(words), {{"run", true},
                                                {"step", true},
                                                {"adopt", true},
                                                {"hf-config", true},
                                                {"follow", false},
                                                {"allow-other", false}});
}

TEST(TranslateMountWords, LeavesOurOwnCommandsAlone) {
  for (const Words& words : {Words{"mount", "/mnt"}, Words{"mount", "/mnt", "--store", "/s"},
                             Words{}, Words{"--help"}, Words{"adopt", "/data", "--name", "x"}}) {
    EXPECT_EQ(*Translate(words), words);
  }
}

TEST(TranslateMountWords, TakesTheWordsOfMount) {
  const auto words =
      Translate({"/srv/store", "/mnt/ckpt", "-n", "-o",
                 "rw,nofail,run=a,step=global_step5,follow,allow_other", "-t", "fuse.ckptfs"});
  ASSERT_TRUE(words) << words.error().message;
  EXPECT_EQ(*words, (Words{"mount", "--run", "a", "--step", "global_step5", "--follow",
                           "--allow-other", "--store", "/srv/store", "--", "/mnt/ckpt"}));
}

TEST(TranslateMountWords, UnescapesCommas) {
  const auto words = Translate({"none", "/m", "-o", "run=a\\,b,adopt=/x\\\\y"});
  ASSERT_TRUE(words);
  EXPECT_EQ(*words, (Words{"mount", "--run", "a,b", "--adopt", "/x\\y", "--", "/m"}));
}

TEST(TranslateMountWords, RefusesMissingAndUnwantedValues) {
  EXPECT_FALSE(Translate({"/s", "/m", "-o", "run"}));
  EXPECT_FALSE(Translate({"/s", "/m", "-o", "follow=1"}));
  EXPECT_FALSE(Translate({"/s", "/m", "-o", "hf-config"}));
  EXPECT_FALSE(Translate({"/s", "/m", "-o"}));
}

TEST(TranslateMountWords, RefusesWhatNobodyKnows) {
  for (const char* option : {"rnu=a", "remount", "bind", "follow,nofial", "Run=a"}) {
    EXPECT_FALSE(Translate({"/s", "/m", "-o", option})) << option;
    EXPECT_TRUE(Translate({"/s", "/m", "-ns", "-o", option})) << option;
  }
  EXPECT_TRUE(Translate(
      {"/s", "/m", "-o", "rw,dev,suid,user,x-systemd.requires=a,X-mount.mkdir,comment=b"}));
}

TEST(ParseBytes, KnowsUnits) {
  EXPECT_EQ(*ParseBytes("0"), 0u);
  EXPECT_EQ(*ParseBytes("1000"), 1000u);
  EXPECT_EQ(*ParseBytes("64k"), 64u << 10);
  EXPECT_EQ(*ParseBytes("1.5GiB"), 3ull << 29);
  EXPECT_EQ(*ParseBytes("2T"), 2ull << 40);
  for (const char* bad : {"", "x", "-1", "1X", "nan", "inf", "1e30", "9E", "1 G", "1GG"}) {
    EXPECT_FALSE(ParseBytes(bad)) << bad;
  }
}

TEST(ParseCount, IsDigits) {
  EXPECT_EQ(*ParseCount("0"), 0u);
  EXPECT_EQ(*ParseCount("2147483647"), 2147483647u);
  for (const char* bad : {"", "-3", "+1", "1K", " 1", "0x10", "2147483648", "99999999999"}) {
    EXPECT_FALSE(ParseCount(bad)) << bad;
  }
}

TEST(ParseStepReference, IsRunSlashId) {
  const auto step = ParseStepReference("run7/global_step5");
  ASSERT_TRUE(step);
  EXPECT_EQ(step->run, "run7");
  EXPECT_EQ(step->id, "global_step5");
  for (const char* bad : {"", "run7", "/x", "run7/", "a/b/c", "../x", "a/..", "./b", "a\n/b"}) {
    EXPECT_FALSE(ParseStepReference(bad)) << bad;
  }
}

TEST(HumanBytes, HasOneDecimal) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(3ull << 40), "3.0 TiB");
}

TEST(AbsolutePath, IsStableForPathsThatDoNotExist) {
  EXPECT_EQ(*AbsolutePath("/no/such/../dir/"), "/no/dir");
  const std::string here = *AbsolutePath(".");
  EXPECT_EQ(*AbsolutePath("x"), here == "/" ? "/x" : here + "/x");
}

TEST(AbsolutePath, RefusesUrls) {
  for (const char* url : {"s3://bucket/run", "hf://org/model", "GS://b"}) {
    const auto path = AbsolutePath(url);
    ASSERT_FALSE(path) << url;
    EXPECT_EQ(path.error().code, ErrorCode::kUnsupported);
  }
  EXPECT_TRUE(AbsolutePath("/data/a://b"));
}

TEST(HumanDuration, HasTwoUnits) {
  constexpr int64_t kSecond = 1'000'000'000;
  EXPECT_EQ(HumanDuration(-5), "0 s");
  EXPECT_EQ(HumanDuration(59 * kSecond), "59 s");
  EXPECT_EQ(HumanDuration(60 * kSecond), "1 min");
  EXPECT_EQ(HumanDuration((2 * 3600 + 180) * kSecond), "2 h 3 min");
  EXPECT_EQ(HumanDuration((49 * 3600) * kSecond), "2 d 1 h");
}

TEST(DefaultStore, IsWhatTheEnvironmentSays) {
  ::setenv("CKPTFS_STORE", "/data/store", 1);
  EXPECT_EQ(DefaultStore(), "/data/store");
  ::setenv("CKPTFS_STORE", "", 1);
  EXPECT_NE(DefaultStore(), "");
  ::unsetenv("CKPTFS_STORE");
}

TEST(DefaultStore, DependsOnTheUser) {
  if (::geteuid() == 0) {
    EXPECT_EQ(DefaultStore(), "/var/lib/ckptfs");
  } else {
    ::setenv("XDG_DATA_HOME", "/data/home", 1);
    EXPECT_EQ(DefaultStore(), "/data/home/ckptfs");
  }
}

}  // namespace
}  // namespace ckptfs
