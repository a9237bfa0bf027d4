// Counts the words of its input, with what Go programs are made of: goroutines, channels,
// interfaces, closures, maps, panics and switches that become tables.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
)

type sink interface {
	take(word string, times int) error
}

type printed struct{ lines int }

type listed struct{ Words map[string]int }

func (p *printed) take(word string, times int) error {
	p.lines++
	_, err := fmt.Printf("%6d %s\n", times, word)
	return err
}

func (l listed) take(word string, times int) error {
	if times <= 0 {
		return errors.New("no such word: " + word)
	}
	l.Words[word] = times
	return nil
}

//go:noinline
func size(n int) string {
	switch n {
	case 1:
		return "one"
	case 2:
		return "two"
	case 3:
		return "three"
	case 4:
		return "four"
	case 5:
		return "five"
	case 6:
		return "six"
	case 7:
		return "seven"
	case 8:
		return "eight"
	case 9:
		return "nine"
	}
	return "many"
}

func count(lines <-chan string, done *sync.WaitGroup, lock *sync.Mutex, found map[string]int) {
	defer done.Done()
	for line := range lines {
		for _, word := range strings.Fields(line) {
			lock.Lock()
			found[strings.ToLower(word)]++
			lock.Unlock()
		}
	}
}

func main() {
	defer func() {
		if reason := recover(); reason != nil {
			fmt.Fprintln(os.Stderr, "stopped:", reason)
			os.Exit(1)
		}
	}()
	found, lines := map[string]int{}, make(chan string, 16)
	var lock sync.Mutex
	var done sync.WaitGroup
	for i := 0; i < 4; i++ {
		done.Add(1)
		go count(lines, &done, &lock, found)
	}
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		lines <- input.Text()
	}
	close(lines)
	done.Wait()
	words := make([]string, 0, len(found))
	for word := range found {
		words = append(words, word)
	}
	sort.Slice(words, func(i, j int) bool { return found[words[i]] > found[words[j]] })
	all := listed{map[string]int{}}
	for _, to := range []sink{&printed{}, all} {
		for _, word := range words {
			if err := to.take(word+size(len(word)), found[word]); err != nil {
				panic(err)
			}
		}
	}
	json.NewEncoder(os.Stdout).Encode(all)
}
